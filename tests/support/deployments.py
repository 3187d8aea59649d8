"""Sets of Helm chart values for tests: valid cases, and mistakes that the chart rejects."""

PLAN = """\
# A plan.
model: llama-3.1-8b
router: jsq
pools:
- {machines: 1, machine: dgx-a100, role: prefill, tensor_parallel: 1, instances: 3}
- {machines: 1, machine: dgx-h100, role: decode, tensor_parallel: 1, instances: 2}
"""

GPU = {
    "replicas": 4,
    "device": "cuda",
    "kvCacheMemory": "60Gi",
    "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "128Gi"}, "requests": {"cpu": "8"}},
    "nodeSelector": {"twofold/machine": "dgx-h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 1,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "twofold"}},
                    },
                }
            ]
        }
    },
    "annotations": {"example.com/team": "serving"},
    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "kvStore": {"memory": "64Gi", "disk": "900Gi", "volumeSize": "1Ti", "storageClass": "nvme"},
    "maxUnavailable": 2,
    "extraArgs": ["--no-pin-cores"],
}

CASES = {
    "defaults": {},
    "gpus": {
        "workers": {"prefill": GPU, "decode": {**GPU, "kvStore": {"memory": "1Gi", "disk": "5Gi"}}},
        "image": {"repository": "registry.example.com/twofold", "tag": "1", "pullSecrets": ["registry"]},
        "model": {
            "servedName": "llama",
            "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        },
        "serve": {
            "maxNumBatchedTokens": "auto",
            "slo": "ttft=2,tpot=0.1",
            "extraArgs": ["--overload=early", "--max-running=64"],
        },
        "plan": PLAN,
        "gateway": {"annotations": {"example.com/team": "serving"}, "startupSeconds": 605},
    },
    "colocated": {
        "workers": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 2}},
        "allowAnonymous": True,
    },
    "moving roles": {
        "workers": {"mixed": {"replicas": 1, "workersPerPod": 2}},
        "serve": {"router": "splitwise", "transport": "nixl"},
    },
    "created secrets": {"clusterKey": {"value": "# a key\n00ff\n"}, "apiKeys": {"value": "ann secret 4 -\nbob hush\n"}},
    "existing secrets": {"clusterKey": {"existingSecret": "their-key"}, "apiKeys": {"existingSecret": "theirs"}},
    "monitoring and network policy": {
        "serviceMonitor": {"enabled": True, "interval": "5s", "labels": {"release": "prometheus"}},
        "grafanaDashboard": {"enabled": True},
        "networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]},
        "gateway": {"serviceType": "LoadBalancer", "port": 80, "busPort": 7000, "disruptionBudget": False},
    },
    "network policy with a public API": {"networkPolicy": {"enabled": True}, "securityContext": {"runAsUser": 1000650}},
    "emulated": {"engine": "emulated", "plan": PLAN, "allowAnonymous": True},
}

MISTAKES = {
    "all replicas are 0": {"workers": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}},
    "emulated needs plan": {"engine": "emulated"},
    "mixed beside others": {"workers": {"mixed": {"replicas": 1}}},
}
