"""Masks by cost instead of sparsity: given the cost of a step, perturb the most important weights that fit."""

from sparsesam.budget.costs import MultiplyAdds, StepCosts, step_costs
from sparsesam.budget.mask import BudgetMask, BudgetUnit, budget_mask

__all__ = ["BudgetMask", "BudgetUnit", "MultiplyAdds", "StepCosts", "budget_mask", "step_costs"]
