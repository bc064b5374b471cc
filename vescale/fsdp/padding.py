from .._errors import PlanError


def check_padding(plan, max_padding):
    if plan.overhead > max_padding:
        raise PlanError("padding")
