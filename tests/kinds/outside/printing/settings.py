"""LEASEHOLD_PRINTING_*."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class PrintingSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LEASEHOLD_PRINTING_", frozen=True, hide_input_in_errors=True)

    most_copies: int = Field(10, ge=1, description="Copies that one order may ask for.")
