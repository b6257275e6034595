"""The domains of the zoo, each a package of the same rooms: network, losses, metrics, baselines, task, predict."""
