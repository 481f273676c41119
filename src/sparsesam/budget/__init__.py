"""Masks by cost instead of sparsity: given the cost of a step, perturb the most important weights that fit."""

from sparsesam.budget.choice import BudgetUnit
from sparsesam.budget.costs import LayerCosts, layer_costs
from sparsesam.budget.mask import BudgetMask, BudgetReport, budget_mask

__all__ = ["BudgetMask", "BudgetReport", "BudgetUnit", "LayerCosts", "budget_mask", "layer_costs"]
