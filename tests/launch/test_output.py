"""What the ranks print reaches the caller: in rank order, live, collected, and never without bound."""

import os

import dualpipe_lab as lab


def _chatty(rank, world_size):
    import sys

    for line in range(3):
        print(f"{rank}.{line} é")
    print(f"warn {rank}", file=sys.stderr)


def test_ordered_output_is_in_rank_order(capsys):
    lab.launch(_chatty, 3)
    captured = capsys.readouterr()
    assert captured.out.split("\n") == [f"{rank}.{line} é" for rank in range(3) for line in range(3)] + [""]
    assert captured.err.split("\n") == [f"warn {rank}" for rank in range(3)] + [""]


def test_live_output_names_the_rank_of_each_line(capsys):
    lab.launch(_chatty, 2, output="live")
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] {r}.{i} é" for r in range(2) for i in range(3)]


def test_collected_output_is_not_printed_and_has_what_subprocesses_and_c_code_wrote(capsys):
    def fn(rank, world_size):
        os.write(1, b"from C\n")
        os.system("echo from a shell")

    assert lab.launch(fn, 2, output="collect").output == ["from C\nfrom a shell\n"] * 2
    assert capsys.readouterr().out == ""


def test_a_flood_of_output_is_cut_and_said_so():
    def fn(rank, world_size):
        for _ in range(500):
            print("x" * 99_999)

    text = lab.launch(fn, 1, output="collect").output[0]
    assert 4_000_000 < len(text) < 4_100_000
    assert text.endswith("the rest is dropped]\n")
