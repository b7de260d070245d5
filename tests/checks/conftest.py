"""What tests of checks and grading share: the cells of a solution and of its exercise, and an answer in their place."""

from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "ranks": "start/ranks-and-messages",
    "time": "start/time",
    "data_parallel": "dp/data-parallel",
    "dp_gradients": "dp/dp-gradients",
    "distributed_adam": "dp/distributed-adam",
    "zero_1": "dp/zero-1",
    "zero_2": "dp/zero-2",
    "zero_3": "dp/zero-3",
    "mixed_precision_adam": "dp/mixed-precision-adam",
    "io": "dp/io",
    "topology": "dp/topology",
    "hybrid_zero": "dp/hybrid-zero",
    "column_parallel": "tp/column-parallel",
    "row_parallel": "tp/row-parallel",
    "swiglu": "tp/swiglu",
    "gqa": "tp/gqa",
    "lm_head": "tp/lm-head",
    "embedding": "tp/embedding",
    "rmsnorm": "tp/rmsnorm",
    "cross_entropy": "tp/cross-entropy",
    "block": "tp/block",
    "pp_basic": "pp/pp-basic",
    "gpipe": "pp/gpipe",
    "gradient_checkpointing": "pp/gradient-checkpointing",
    "pipedream": "pp/pipedream",
    "interleaved": "pp/interleaved",
    "zero_bubble": "pp/zero-bubble",
    "easy_dualpipe": "pp/easy-dualpipe",
    "dualpipe": "pp/dualpipe",
    "v_shapes": "pp/v-shapes",
    "all_to_all": "ep/all-to-all",
    "async_all_to_all": "ep/async-all-to-all",
    "smoe": "ep/smoe",
    "ring_all_reduce": "cp/ring-all-reduce",
    "flash_attention": "cp/flash-attention",
    "ring_attention": "cp/ring-attention",
    "topk_gradient": "ep/topk-gradient",
    "v3_moe": "ep/v3-moe",
    "one_f_one_b_basic": "ep/one-f-one-b-basic",
    "one_f_one_b_overlap": "ep/one-f-one-b-overlap",
    "gshard": "ep/gshard",
    "eplb": "ep/eplb",
    "softmax": "cp/softmax",
    "online_softmax": "cp/online-softmax",
    "ring_softmax": "cp/ring-softmax",
}


class Book:
    """The code cells of solutions and exercises."""

    def __init__(self):
        self.cells = {
            folder: {topic: self._read(ROOT / folder / f"{page}.md") for topic, page in EXAMPLES.items()}
            for folder in ("solutions", "exercises")
        }

    @staticmethod
    def _read(path):
        cells = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
        return [(" ".join(cell.metadata.get("tags", [])), cell.source) for cell in cells]

    @staticmethod
    def page(topic, folder="solutions"):
        """The text of a notebook's page."""
        return (ROOT / folder / f"{EXAMPLES[topic]}.md").read_text(encoding="utf-8")

    def answer(self, name, folder="solutions"):
        """The text of an answer cell."""
        return dict(self.cells[folder][name.rpartition("-")[0]])[f"answer-{name}"]

    def text_of(self, name, answer):
        """The text of an answer: it is one, or replacements in the solution."""
        if isinstance(answer, str):
            return answer
        text = self.answer(name)
        for old, new in answer:
            assert old in text, f"{name}: {old!r} is not in the solution"
            text = text.replace(old, new)
        return text

    def arguments(self, name, text):
        """Run given cells and the answer as a notebook would; return what the check is called with."""
        from dualpipe_lab.grading.evaluator import arguments_of

        topic = name.rpartition("-")[0]
        names = {"__name__": "__main__"}
        cells = self.cells["exercises"][topic]
        for source in [source for tags, source in cells if not tags] + [text]:
            exec(compile(source, f"answer-{name}", "exec"), names)
        return [ast_eval(part, names) for part in arguments_of(dict(cells)[f"check-{name}"])]

    def verdict(self, name, text):
        """What the check says of an answer, with what ranks return opened as the grader opens it."""
        from dualpipe_lab.checks.registry import find
        from dualpipe_lab.world import payload

        arguments = self.arguments(name, text)
        with payload.data_only():
            return find(name).verdict(*arguments)


def ast_eval(expression, names):
    import ast

    return eval(compile(ast.Expression(expression), "check", "eval"), names)


@pytest.fixture(scope="session")
def book():
    return Book()
