"""What the server imports, from which the processes of a study are forked."""

import dex.verbs.evaluate
import dex.verbs.train  # noqa: F401
