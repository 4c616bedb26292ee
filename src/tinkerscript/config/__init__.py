"""The run's configuration: YAML read into pydantic models that refuse unknown keys.

`scripts/write_config_docs.py` writes docs/config.md from the fields' docstrings.
"""

from tinkerscript.config.engine_section import Dtype, EngineConfig, LoraConfig
from tinkerscript.config.inference_section import InferenceConfig, LaunchConfig, RoleConfig
from tinkerscript.config.loading import dump_config, import_name, load_config, parse_config
from tinkerscript.config.recipes import RECIPES
from tinkerscript.config.run_section import (
    RUNS,
    ClusterConfig,
    EvaluationConfig,
    MetricsConfig,
    RunConfig,
    TaskConfig,
    WeightedTaskConfig,
    WorkersConfig,
)
from tinkerscript.config.section import Section
from tinkerscript.config.server_section import DEFAULT_PORT, ClientConfig, InterchangeConfig, Port
from tinkerscript.config.training_section import (
    CORRECTION_WEIGHTS,
    KL_LOSSES,
    Bounds,
    CreditConfig,
    CurriculumConfig,
    DistillationConfig,
    JudgeConfig,
    RolloutCorrectionConfig,
    SamplingConfig,
    SftConfig,
    TrainingConfig,
)

__all__ = [
    "CORRECTION_WEIGHTS",
    "DEFAULT_PORT",
    "KL_LOSSES",
    "RECIPES",
    "RUNS",
    "Bounds",
    "ClientConfig",
    "ClusterConfig",
    "CreditConfig",
    "CurriculumConfig",
    "DistillationConfig",
    "Dtype",
    "EngineConfig",
    "EvaluationConfig",
    "InferenceConfig",
    "InterchangeConfig",
    "JudgeConfig",
    "LaunchConfig",
    "LoraConfig",
    "MetricsConfig",
    "Port",
    "RoleConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "SftConfig",
    "TaskConfig",
    "TrainingConfig",
    "WeightedTaskConfig",
    "WorkersConfig",
    "dump_config",
    "import_name",
    "load_config",
    "parse_config",
]
