"""What the server imports, from which the processes of a study are forked."""

import dex.evaluate.run
import dex.train  # noqa: F401
