"""Where the accounts of incidents go: the log, and a folder of JSON files if there is one."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from pathlib import Path

from lgroup._incident import Incident

logger = logging.getLogger("lgroup.group")

#: Incidents that `LearnerGroup.post_mortems` still knows.
KEPT = 100


class PostMortems:
    """One file per incident, ``post-mortem-0001.json``, and the last ones in memory."""

    def __init__(self, log_dir: str | os.PathLike[str] | None) -> None:
        self._log_dir = None if log_dir is None else Path(log_dir)
        self.kept: deque[Incident] = deque(maxlen=KEPT)

    def write(self, incident: Incident) -> None:
        """Say what happened. A folder that cannot be written to costs the file, nothing else."""
        self.kept.append(incident)
        logger.warning("%s", incident.text())
        if self._log_dir is None:
            return
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **incident.as_dict()}
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            path = self._log_dir / f"post-mortem-{incident.number:04d}.json"
            path.write_text(json.dumps(record, indent=2, default=str) + "\n")
        except OSError as error:
            logger.warning("the post-mortem of incident %d could not be written: %s", incident.number, error)

    def warn(self, text: str) -> None:
        """Say something that is no incident."""
        logger.warning("%s", text)
