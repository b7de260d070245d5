"""One wrong line in each official part, other than those of `wrong.py`: the part's own check notices it."""

import pytest

from dualpipe_course.own.finder import official
from dualpipe_course.own.parts import PARTS
from dualpipe_course.own.runs import part_check

PLANTED = {
    "memory": ("2 * shard)", "shard)"),
    "ring": ("whole[: x.numel()]", "whole[len(whole) - x.numel() :]"),
    "data": ("targets != -100", "targets > 0"),
    "buckets": ("self.missing[number] == 0", "self.missing[number] == 1"),
    "zero1": ("(second.sqrt() + self.eps)", "(second + self.eps).sqrt()"),
    "zero3": ("return dx, reduce_scatter(", "return dx * len(ranks), reduce_scatter("),
    "column": ("return dy.t() @ x", "return (dy.t() @ x) / len(x)"),
    "row": ("total = x.clone()", "total = x"),
    "tokens": ("return all_gather(dy, ctx.ranks), None", "return all_gather(dy, ctx.ranks) / len(ctx.ranks), None"),
    "block": ("(heads, -1)", "(-1, heads)"),
    "messages": ("*x.shape]", "*reversed(x.shape)]"),
    "rows_gpipe": ('for kind in "FB" for i in range(m)', 'for i in range(m) for kind in "FB"'),
    "row_messages": ("place(target, i) != me", "target != stage"),
    "stage": ("return y.detach(), (x, y)", "return y, (x, y)"),
    "execute": ("run.works[way, stage, i] =", "run.works[way, stage, 0] ="),
    "rows_1f1b": ("min(p - 1 - stage, m)", "min(p - stage, m)"),
    "later": ("weight.grad + grad", "grad"),
    "rows_zb_h1": ("[f\"W{i - stage}\"] * (i >= stage)", "[f\"W{i - 1}\"] * (i >= 1)"),
    "softmax": ("of_a * a[1] + of_b * b[1]", "a[1] + b[1]"),
    "ring_attention": ("ds = scale * weights", "ds = weights"),
    "exchange": ("room.copy_(part)", "room.zero_()"),
    "moe": ("[torch.cat(note.rows).argsort()]", "[torch.cat(note.rows)]"),
    "router": ("topk(2, -1)", "topk(1, -1)"),
    "steps": ("grad is not None and out.requires_grad", "grad is not None and out.requires_grad and out is y"),
    "pair": ('{"rest": rest,', '{"rest": x,'),
    "rows_dualpipe": ("late[outside:]", "ends[outside:]"),
    "rows_dualpipev": ("(2 * p - 1 - r, 0)", "(2 * p - 1 - r, m)"),
    "held": ("for position in positions for one in range(size)]", "for position in positions for one in [member]]"),
    "train": ("self.place(stage, i) * self.size + self.member", "self.place(stage, i) * self.size"),
}  # fmt: skip


def test_every_part_has_its_line():
    assert set(PLANTED) == set(PARTS)
    for part, (right, _) in PLANTED.items():
        assert official(part).count(right) == 1, part


@pytest.mark.parametrize("part", PARTS)
def test_the_part_s_own_check_notices_a_wrong_line(part):
    text = official(part).replace(*PLANTED[part]).replace("from .", "from mine.")
    verdict = part_check(part).verdict(text)
    assert not verdict.passed
    assert "cannot read" not in verdict.message
