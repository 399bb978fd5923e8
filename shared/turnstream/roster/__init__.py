"""Every agent that there is: those that the deployment defines in files and modules, which are there for every account,
and those that an account has saved.

One name has one source. What the deployment defines, nobody saves; only the built-in `default` gives way to a saved
one. An agent is named as `name`, which is the version that is current, or as `name@version`.
"""

from turnstream.roster.edition import Edition, Unusable, pin_of
from turnstream.roster.names import Name, Names
from turnstream.roster.roster import Offered, Roster, Unread

__all__ = ["Edition", "Name", "Names", "Offered", "Roster", "Unread", "Unusable", "pin_of"]
