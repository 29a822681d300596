"""Parts of the simulator: models, links, advice, the reproduction page. The entry is poplar/simulator.py."""
