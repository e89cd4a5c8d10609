"""A step's cost and yield: profiles measured, calibrated from published figures, or from data sheets."""
