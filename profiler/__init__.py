"""The cost and the yield of a step: profiles measured, calibrated from published figures, or from data sheets."""
