"""Right answers of another style to the exercises on PipeDream."""

RIGHT = {
    "pipedream-2": {
        "a rank's counters": """
def rows(num_ranks, num_microbatches, num_steps, flush):
    def row(rank):
        words, f, b, total = [], 0, 0, num_microbatches * num_steps
        while b < total:
            end = (b // num_microbatches + 1) * num_microbatches if flush else total
            if f < end and f - b < num_ranks - rank:
                words.append(f"{rank}F{f}")
                f += 1
            else:
                words.append(f"{rank}B{b}")
                b += 1
        return " ".join(words)

    return [row(rank) for rank in range(num_ranks)]
""",
        "shifted lists": """
def rows(num_ranks, num_microbatches, num_steps, flush):
    size, count = (num_microbatches, num_steps) if flush else (num_microbatches * num_steps, 1)
    lines = []
    for rank in range(num_ranks):
        line = ""
        for start in range(0, size * count, size):
            F = [f"{rank}F{start + i} " for i in range(size)]
            B = [f"{rank}B{start + i} " for i in range(size)]
            lead = min(num_ranks - 1 - rank, size)
            padded = [""] * lead + B
            F += [""] * lead
            line += "".join(F[:lead]) + "".join(f + b for f, b in zip(F[lead:], padded[lead:]))
        lines.append(line.strip())
    return lines
""",
    },
    "pipedream-3": {
        "swaps neighbours in the text": """
import re


def with_messages(rows):
    out, p = [], len(rows)
    for r, row in enumerate(rows):
        text = " " + row + " "
        if r > 0:
            text = re.sub(rf" ({r}F(\\d+))(?= )", rf" {r}RECV_F\\2 \\1", text)
            text = re.sub(rf" ({r}B(\\d+))(?= )", rf" \\1 {r}SEND_B\\2", text)
        if r < p - 1:
            text = re.sub(rf" ({r}F(\\d+))(?= )", rf" \\1 {r}SEND_F\\2", text)
            text = re.sub(rf" ({r}B(\\d+))(?= )", rf" {r}RECV_B\\2 \\1", text)
        text = re.sub(rf"({r}SEND_B\\d+) ({r}RECV_F\\d+)", r"\\2 \\1", text)
        out.append(text.strip())
    return out
""",
        "upper ranks receive gradients first": """
def with_messages(rows):
    lowered = []
    for rank, row in enumerate(rows):
        words = []
        for word in row.split():
            kind, i = word[len(str(rank))], word[len(str(rank)) + 1 :]
            if kind == "F":
                late = [words.pop()] if words and "SEND_B" in words[-1] else []
                words += [f"{rank}RECV_F{i}"] * (rank > 0) + late + [word]
                words += [f"{rank}SEND_F{i}"] * (rank < len(rows) - 1)
            else:
                words += [f"{rank}RECV_B{i}"] * (rank < len(rows) - 1) + [word] + [f"{rank}SEND_B{i}"] * (rank > 0)
        lowered.append(" ".join(words))
    return tuple(lowered)
""",
    },
}
