"""The faults, one module for each place that breaks. `Faults` carries a plan out."""

from chaos.faults.injector import Faults

__all__ = ["Faults"]
