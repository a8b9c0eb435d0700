"""Where the tokens of a sequence came from, and why there was no more."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache.prefix.tiers.tier import TierStats
