"""What SkyPilot 0.14 accepts of a task file, as a JSON schema: keys that our example may use, each with its type, and no others.

After `get_task_schema` and `get_resources_schema` of the package, which is too large to install for this."""

from typing import Any

ENVIRONMENT = {
    "type": "object",
    "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}},
    "additionalProperties": False,
}

RESOURCES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "infra": {"type": "string"},
        "cpus": {"type": ["string", "number"]},
        "memory": {"type": ["string", "number"]},
        "accelerators": {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "number"}}]},
        "use_spot": {"type": "boolean"},
        "image_id": {"type": "string"},
        "disk_size": {"type": ["string", "integer"]},
        "job_recovery": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "strategy": {"type": ["string", "null"]},
                        "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                        "recover_on_exit_codes": {"type": ["integer", "array"]},
                    },
                },
            ]
        },
    },
}

TASK: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "workdir": {"type": "string"},
        "num_nodes": {"type": "integer", "minimum": 1},
        "resources": RESOURCES,
        "file_mounts": {"type": "object"},
        "volumes": {"type": "object"},
        "setup": {"type": "string"},
        "run": {"type": "string"},
        "envs": ENVIRONMENT,
        "secrets": ENVIRONMENT,
    },
}
