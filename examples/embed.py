"""lgroup inside a loop of your own: two learner processes fit a sine while this program makes the data."""

import torch

import lgroup


class Net(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))

    def forward(self, batch):
        return self.layers(batch["x"])


class Regression(lgroup.Learner):
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        return torch.nn.functional.mse_loss(fwd_out, batch["y"])


config = (
    lgroup.LearnerGroupConfig()
    .learners(num_learners=2)
    .training(learner_class=Regression, lr=1e-2)
    .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net, model_config={"hidden": 64}))
)
with lgroup.LearnerGroup(config=config) as group:
    for _ in range(400):
        x = torch.rand(256, 1) * 6 - 3  # your simulator, your data loader, your service's requests
        for done in group.update(batch={"x": x, "y": torch.sin(x)}, async_update=True, on_full="block"):
            if done.seq % 100 == 0:
                print(f"update {done.seq}: loss {done.reduced['default_policy']['total_loss']:.4f}")
    weights = group.get_weights()  # after everything submitted before it
net = Net(hidden=64)
net.load_state_dict(weights["default_policy"])
print(f"sin(1) = {net({'x': torch.ones(1, 1)}).item():.3f} after {weights.version} updates")
