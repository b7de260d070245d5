"""Pipeline parallelism: programs as data, their validator, simulator and runtime."""
