"""The checkpoint of the best epoch, in a run folder that may be moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose memory of the best score survives a move of the run folder.

    Lightning drops the best score when the folder of a resumed run is spelled otherwise than before, and then takes
    the first resumed epoch for the best.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the state, with its paths in the folder of now."""
        moved = dict(state_dict)
        if self.dirpath is not None:
            moved["dirpath"] = self.dirpath
            for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                moved[name] = self._here(moved.get(name) or "")
            moved["best_k_models"] = {
                self._here(path): score for path, score in moved["best_k_models"].items()
            }
        super().load_state_dict(moved)

    def _here(self, path: str) -> str:
        return str(Path(str(self.dirpath)) / Path(path).name) if path else ""
