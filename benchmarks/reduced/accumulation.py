"""A pipeline's step x accumulation: each step divides all that is accumulated by the microbatches (torchtitan 1733)."""

from dualpipe_course.whole.torch_defects import TORCH_DEFECTS

if __name__ == "__main__":
    print(TORCH_DEFECTS[2].look())
