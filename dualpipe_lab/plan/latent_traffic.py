"""`LatentTraffic`: the calls of latent attention: its latents along tp, and latents or keys and values along cp.

Chapter: book/tp/latent-attention.  In: a stage's calls, sizes of latents.  Out: calls, entered by the stage.
  forward               the sum of T h; the ring of cp
  backward              sums of T r_q (T h without a latent of queries), T r_kv and T d_position
  sequence parallelism  a sum is a reduce-scatter, or a gather; the down-projections and their norms are summed
  cp                    latents travel where they are shorter than the keys and values of a rank's heads; what unfolds
                        them is then no layer that gathers its input again
"""

from dualpipe_lab.plan.layer_traffic import StageTraffic
from dualpipe_lab.tp.latent_sizes import LatentSizes


class LatentTraffic:
    """Enters the calls of latent attention.

    Args:
        stage: of this rank.
        sizes: of latents and heads.
    """

    def __init__(self, stage: StageTraffic, sizes: LatentSizes) -> None:
        self.stage, self.sizes = stage, sizes
        self.sends_latents = stage.layout is not None and sizes.is_shorter(stage.config.num_heads // stage.plan.tp)
        self.query_width = sizes.query_rank or stage.config.hidden_size

    def forward(self) -> None:
        """Enter the forward of a layer's attention."""
        for width in (self.query_width, self.sizes.kv_rank, self.sizes.position):
            self.stage.gather_input(width)
        self.stage.ring("forward")
        self.stage.sum_output()

    def backward(self) -> None:
        """Enter its backward."""
        stage, rank = self.stage, self.sizes.kv_rank
        stage.gather_output_grad()
        stage.ring("backward")
        stage.sum_input_grad(self.query_width)
        stage.sum_output(rank) if self.sends_latents else stage.sum_input_grad(rank)
        stage.sum_output(self.sizes.position)
        if stage.plan.sequence_parallel:
            for place, numel in enumerate(self.sizes.replicated(stage.config.hidden_size)):
                stage.calls.all_reduce(stage.tp, numel, stage.wide if place % 2 else stage.element)  # norms are odd
