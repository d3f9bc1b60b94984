"""Reinforcement learning: value networks, policies, actor-critics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import Residual, conv
from architectures.registry import BATCH, Architecture, Inputs, image, vector

FAMILY = "reinforcement learning"


class AtariFeatures(nn.Module):
    """Mnih et al. 2015: four frames of 84x84 to 3136 features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return x.reshape(-1, 64 * 7 * 7)


class DQN(AtariFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3136, 512)
        self.fc2 = nn.Linear(512, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(super().forward(x / 255.0))))


class DuelingDQN(nn.Module):
    """Wang et al. 2016: a value plus centred advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.features = AtariFeatures()
        self.advantage = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)


class ActorCritic(nn.Module):
    """PyTorch's example: one hidden layer, action probabilities and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


class AtariActorCritic(AtariFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3136, 512)
        self.pi, self.v = nn.Linear(512, 6), nn.Linear(512, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.linear(super().forward(x)))
        return {"logits": self.pi(hidden), "value": self.v(hidden).squeeze(-1)}


class PPO(nn.Module):
    """Separate tanh networks; the log standard deviation is a free parameter."""

    def __init__(self, state: int = 17, action: int = 6) -> None:
        super().__init__()
        self.actor = self.layers(state, action)
        self.critic = self.layers(state, 1)
        self.log_std = nn.Parameter(torch.zeros(1, action))

    @staticmethod
    def layers(inputs: int, outputs: int) -> nn.Module:
        hidden = (nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(64, outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.actor(x)
        return mean, self.log_std.expand_as(mean).exp(), self.critic(x)


class TwinQ(nn.Module):
    """Haarnoja et al. 2018: two critics of state and action."""

    def __init__(self, state: int = 17, action: int = 6) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(state + action, 256), nn.Linear(256, 256), nn.Linear(256, 1)
        self.l4, self.l5, self.l6 = nn.Linear(state + action, 256), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([state, action], 1)
        q1 = self.l3(F.relu(self.l2(F.relu(self.l1(both)))))
        q2 = self.l6(F.relu(self.l5(F.relu(self.l4(both)))))
        return q1, q2


class GaussianActor(nn.Module):
    """The policy of SAC: mean and bounded log standard deviation; in evaluation mode the squashed mean."""

    def __init__(self, state: int = 17, action: int = 6) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(state, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.mean, self.log_std = nn.Linear(256, action), nn.Linear(256, action)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(state)
        log_std = torch.clamp(self.log_std(x), -20, 2)
        return torch.tanh(self.mean(x)), log_std


class DDPGActor(nn.Module):
    """Lillicrap et al. 2016: the action, between -max_action and max_action."""

    def __init__(self, state: int = 17, action: int = 6, max_action: float = 2.0) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(state, 400), nn.Linear(400, 300), nn.Linear(300, action)
        self.max_action = max_action

    def forward(self, state: Tensor) -> Tensor:
        x = F.relu(self.l2(F.relu(self.l1(state))))
        return self.max_action * torch.tanh(self.l3(x))


class AlphaZero(nn.Module):
    """Silver et al. 2018 in small, for 9x9 Go: a residual tower, a policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (Residual(conv(128, 128), conv(128, 128, act=None)) for _ in range(5))
        self.tower = nn.Sequential(conv(17, 128), *blocks)
        self.policy_conv, self.value_conv = conv(128, 2, 1), conv(128, 1, 1)
        self.policy_fc = nn.Linear(2 * 81, 82)
        self.value_fc1, self.value_fc2 = nn.Linear(81, 256), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.tower(x))
        policy = self.policy_fc(self.policy_conv(x).view(-1, 2 * 9 * 9))
        value = F.relu(self.value_fc1(self.value_conv(x).view(-1, 9 * 9)))
        return F.log_softmax(policy, dim=1), torch.tanh(self.value_fc2(value))


def state_and_action() -> Inputs:
    return torch.randn(BATCH, 17), torch.randn(BATCH, 6)


_frames = image(84, 4)

ARCHITECTURES = [
    Architecture(name, FAMILY, make, inputs, outputs)
    for name, make, inputs, outputs in (
        ("dqn_atari", DQN, _frames, ("fc2",)),
        ("dueling_dqn_atari", DuelingDQN, _frames, ("advantage.2", "value.2")),
        ("actor_critic", ActorCritic, vector(4), ("action_head", "value_head")),
        ("actor_critic_atari", AtariActorCritic, _frames, ("pi", "v")),
        ("ppo_mlp", PPO, vector(17), ("actor.4", "critic.4", "log_std")),
        ("sac_twin_q", TwinQ, state_and_action, ("l3", "l6")),
        ("sac_actor", GaussianActor, vector(17), ("mean", "log_std")),
        ("ddpg_actor", DDPGActor, vector(17), ("l3",)),
        ("alphazero", AlphaZero, image(9, 17), ("policy_fc", "value_fc2")),
    )
]
