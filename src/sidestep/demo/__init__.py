"""The main job, shown: real programs over kernel TCP and under sidestep."""
