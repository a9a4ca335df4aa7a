"""The llmc:: ops, one file each (or one family): importing this package registers them all with torch."""

from llmc.ops import attention as attention
from llmc.ops import embedding as embedding
from llmc.ops import gated_activation as gated_activation
from llmc.ops import kv_write as kv_write
from llmc.ops import layer_norm as layer_norm
from llmc.ops import linear as linear
from llmc.ops import rms_norm as rms_norm
from llmc.ops import rope as rope
from llmc.ops import sampling as sampling
from llmc.ops import select_channels as select_channels
from llmc.ops import select_rows as select_rows
from llmc.ops import token_codes as token_codes
from llmc.ops import weight_codes as weight_codes
