"""Data sets, and partitions that distribute them to clients."""

from fl_lightning.data.base import FederatedData
from fl_lightning.data.dirichlet_forms import DirichletPerClient, UncappedDirichlet
from fl_lightning.data.feature_skew import FeatureNoise, FeatureSkew, RotatedClients
from fl_lightning.data.hugging_face import HuggingFaceData
from fl_lightning.data.image_base import ImageData
from fl_lightning.data.image_folder import ImageFolder
from fl_lightning.data.images import FederatedImages
from fl_lightning.data.index_file import FromFile
from fl_lightning.data.leaf import LeafData
from fl_lightning.data.map_style import DataModuleData, DatasetData
from fl_lightning.data.partition import (
    IID,
    Dirichlet,
    Natural,
    Partition,
    Shards,
    dirichlet_partition,
)
from fl_lightning.data.published_partitions import (
    LabelsPerClient,
    NIIDBenchDirichlet,
    NIIDBenchIID,
    PFLlibPathological,
    PFLlibPractical,
    Quantity,
)
from fl_lightning.data.table import TableData
from fl_lightning.data.text.conversation_data import ConversationFiles
from fl_lightning.data.text.corpus_data import CorpusData
from fl_lightning.data.text.federation import InstructionData, TextData
from fl_lightning.data.text.labelled_text import LabelledText
from fl_lightning.data.text.natural_instructions import NaturalInstructions
from fl_lightning.data.text.preference_data import PreferenceData, PreferenceFiles, PreferencePairs
from fl_lightning.data.text.text_files import TextFiles
from fl_lightning.data.text.token_data import DataModuleTokens, TokenData
from fl_lightning.data.text.token_items import TokenFile
from fl_lightning.data.two_clients import TwoClients
