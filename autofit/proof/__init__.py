"""The gradient proof: is the gradient of a trial the same as that of the baseline?"""
