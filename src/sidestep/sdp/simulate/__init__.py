"""Simulated conversations: see `conversation`."""

from sidestep.sdp.simulate.conversation import Conversation, Outcome, converse
from sidestep.sdp.simulate.plan import Plan, PlanKind, draw
from sidestep.sdp.simulate.user import Surprise

__all__ = ["Conversation", "PlanKind", "Outcome", "Plan", "Surprise", "converse", "draw"]
