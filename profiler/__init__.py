"""What a step costs and yields: profiles measured, calibrated from published figures, or derived from data sheets."""
