"""A pipeline's step x clipping: each rank clips by the norm of its own stages (torchtitan 596)."""

from dualpipe_course.whole.torch_defects import TORCH_DEFECTS

if __name__ == "__main__":
    print(TORCH_DEFECTS[1].look())
