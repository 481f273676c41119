"""Other methods of the family, each a small subclass: another direction, another gradient for the update.

| class             | what it changes                                                        | passes        |
|-------------------|------------------------------------------------------------------------|---------------|
| `MomentumSAM`     | the direction: against the base optimizer's momentum                   | 1             |
| `ExtrapolatedSAM` | the direction and its length: the base optimizer's last update         | 1             |
| `FriendlySAM`     | the direction: the gradient less its moving average                    | 2             |
| `ZSharp`          | the direction: in each tensor, only entries with a large z-score       | 2             |
| `ESAM`            | the tensors that are perturbed: drawn anew in each step                | 2             |
| `GSAM`            | the update: less of the gradient at w that is orthogonal to SAM's      | 2             |
| `WSAM`            | the update: sharpness with a weight of its own                         | 2             |
| `LookSAM`         | the update: between SAM's steps, a part of the last SAM gradient again | 2, 1 between  |

Arguments that are not listed are those of `SharpnessAware`: every method takes masks, schedules, checkpoints.
"""

from sparsesam.variants.directions import ESAM, FriendlySAM, ZSharp
from sparsesam.variants.one_pass import ExtrapolatedSAM, MomentumSAM
from sparsesam.variants.two_gradients import GSAM, WSAM, LookSAM

__all__ = ["ESAM", "GSAM", "WSAM", "ExtrapolatedSAM", "FriendlySAM", "LookSAM", "MomentumSAM", "ZSharp"]
