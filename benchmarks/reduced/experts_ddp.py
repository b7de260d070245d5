"""Experts on other ranks x DDP: an expert's gradient is a sum over the ranks where DDP's is a mean (pytorch 160285)."""

from dualpipe_course.whole.torch_defects import TORCH_DEFECTS

if __name__ == "__main__":
    print(TORCH_DEFECTS[0].look())
