# Timelines
from .embed import compare as compare
from .live.play import play as play
from .live.play import Play as Play
from .explorer import Explorer as Explorer
from .studio import Studio as Studio
from dualpipe_lab.pp.studio import Challenge as Challenge
from .planner import Planner as Planner
from .plots import plot_timelines as plot_timelines
from .plots import timeline_png as timeline_png
from .lanes import Lanes as Lanes

# What ranks hold and send
from .grid import grid as grid
from .grid import RankGrid as RankGrid
from .steplog import Steps as Steps
from .collective_steps import collective_steps as collective_steps
from .collectives import RankValues as RankValues
from .collectives import Gallery as Gallery
from .shards import Shards as Shards
from .shards import ShardedTensor as ShardedTensor
from .shards import Transition as Transition
from .cell_grid import CellGrid as CellGrid

# Boxes and arrows
from .diagram import Arrow as Arrow
from .diagram import Box as Box
from .diagram import Diagram as Diagram
from .diagram import transformer_block as transformer_block

# Numbers
from .chart import Chart as Chart
from .stacked_bars import StackedBars as StackedBars

# Pages without a kernel
from .embed import timeline_html as timeline_html
from .embed import inline_script as inline_script
from .embed import page as page
