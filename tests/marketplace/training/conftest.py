"""Tests of training keep their artifacts in a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_django import Settings


@pytest.fixture(autouse=True)
def own_store(settings: Settings, tmp_path: Path) -> Path:
    settings.S3_BUCKET = ""
    settings.ARTIFACT_DIR = tmp_path / "artifacts"
    return tmp_path / "artifacts"
