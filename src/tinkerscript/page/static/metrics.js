// The meanings of a run's metrics, and their sections.

const TEXT = {
  "reward/mean": "mean reward of the step's episodes",
  "reward/deviation": "standard deviation of the rewards",
  "eval/score": "mean reward of the held-out samples",
  "eval/failed": "held-out episodes that failed",
  "success/rate": "share of episodes that reported success",
  "held_out/nll": "negative log-likelihood of held-out chats, nats per token",
  "train/nll": "negative log-likelihood, nats per token",
  "train/margin": "DPO: how much more the policy has come to prefer the better episode of a pair than the first weights do, times beta",
  "train/accuracy": "DPO: share of pairs with a margin above 0",
  "held_out/loss": "DPO's loss on held-out pairs",
  "held_out/margin": "DPO's margin on held-out pairs",
  "held_out/accuracy": "DPO's share of held-out pairs with a margin above 0",
  "train/entropy": "entropy of the policy on sampled tokens, nats per token",
  "train/kl_start": "divergence from the first weights, nats per token",
  "distillation/teacher_kl": "divergence from the teacher on sampled tokens, nats per token",
  "train/clip_fraction": "share of tokens with a clipped ratio",
  "train/kl_step": "how far the policy moved within the step, nats a token; above 0.1 the learning rate is high",
  "train/update_ratio": "norm of an optimizer step over that of the weights that train",
  "correction/weight": "mean weight of a token for a sampler that is not the trainer",
  "correction/max_ratio": "largest ratio of the trainer's probability to the sampler's",
  "train/grad_norm": "norm of the gradient before clipping",
  "train/sequences": "sequences that carried a gradient",
  "response_tokens/mean": "tokens per reply",
  "response_tokens/max": "tokens of the longest reply",
  "response_tokens/cut_off": "share of replies cut off by the token limit",
  "prompt_tokens/mean": "tokens per prompt",
  "prompt_tokens/max": "tokens of the longest prompt",
  "episode_tokens/mean": "sampled tokens per episode",
  "turns/mean": "model calls per episode",
  "turns/max": "model calls of the longest episode",
  "system/load": "running and waiting processes on this machine (one-minute load average)",
  "system/memory_gb": "memory in use on this machine",
  "system/trainer_gb": "memory of the trainer",
  "system/gpu_memory_gb": "memory in use on the trainer's GPU",
  "system/gpu_load": "utilization of the trainer's GPU at the end of the step",
  "time/rollout_s": "seconds until the step's episodes were complete",
  "time/sample_s": "seconds of that wait which model calls took, by how the episodes that ran divided their time",
  "time/wait_stale_s": "seconds of that wait which were for groups that would have been too old later",
  "time/train_s": "seconds to train and publish",
  "time/publish_s": "seconds to publish the weights",
  "episodes_per_s": "episodes per second over the whole step",
  "episodes/accepted": "episodes with a result",
  "episodes/failed": "episodes that used up their attempts",
  "episodes/retried": "episodes that needed more than one attempt",
  "episodes/stale": "episodes that were too old to train",
  "groups/trained": "groups with different rewards",
  "groups/same_reward": "groups without signal: all rewards are equal",
  "groups/dropped": "groups with too few results",
  "alignment/max_abs_dlogp": "largest difference between the trainer's and the sampler's log probability of a token",
  "alignment/mean_abs_dlogp": "mean difference between the trainer's and the sampler's log probability of a token",
  "alignment/truncated": "replies cut off by the token limit",
};

const PREFIXES = {
  "episode/score/": "mean of this score over the step's episodes",
  "episode/": "mean of a metric that episodes report",
  "failure/": "episodes that failed for this reason",
  "limit/": "episodes that reached this limit",
  "tool_error/": "tool calls that failed for this reason",
  "lag/": "episodes sampled with weights this many steps old",
  "correction/": "share of tokens that this part of the rollout correction cut off or left out",
};

/** A trained role and the metric of its policy; empty for the main policy's metrics. */
const ofRole = (name) => /^role\/([^/]+)\/(.+)$/.exec(name)?.slice(1) ?? [];

export const about = (name) => TEXT[name] ?? TEXT[ofRole(name)[1]] ?? (Object.entries(PREFIXES).find(([prefix]) => name.startsWith(prefix))?.[1] ?? "");

const SECTIONS = [
  ["Reward and score", /^(reward|eval|success|held_out|episode\/score)\/|^train\/nll$/],
  ["Training", /^(train|correction|replay|lag)\/|^policy_version$/],
  ["Lengths", /^(response_tokens|prompt_tokens|episode_tokens|turns)\/|^episode\/model_calls$/],
  ["Episodes and groups", /^(episodes|groups|failure|limit|tool_error)\//],
  ["Time", /^time\/|^episodes_per_s$|^replicas\//],
  ["Trainer–sampler mismatch", /^alignment\//],
  ["System", /^system\//],
];
const OWN = "Your metrics";
const FIRST = ["reward/mean", "eval/score", "train/nll", "held_out/nll", "distillation/teacher_kl", "train/entropy", "train/loss", "train/grad_norm", "train/clip_fraction", "train/learning_rate", "response_tokens/mean", "turns/mean", "episodes/failed", "groups/trained", "time/rollout_s", "alignment/max_abs_dlogp"];

/** [title, names] of the sections with metrics. Metrics of the user's program come second. */
export function sections(names) {
  const found = new Map([SECTIONS[0][0], OWN, ...SECTIONS.slice(1).map(([title]) => title)].map((title) => [title, []]));
  for (const role of new Set(names.map((name) => ofRole(name)[0]).filter(Boolean))) found.set(`Role ${role}`, []);
  for (const name of names) {
    const [role] = ofRole(name);
    found.get(role ? `Role ${role}` : SECTIONS.find(([, pattern]) => pattern.test(name))?.[0] ?? OWN).push(name);
  }
  const rank = (name) => { const at = FIRST.indexOf(ofRole(name)[1] ?? name); return at < 0 ? FIRST.length : at; };
  return [...found].filter(([, list]) => list.length).map(([title, list]) => [title, list.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))]);
}

const SPREAD = new Set(["reward/mean", "reward/deviation", "reward/lowest", "reward/highest"]);

/** Metrics that share a chart: reward by scorer and by task. */
export function together(names) {
  const scores = names.filter((name) => name.startsWith("episode/score/"));
  const tasks = names.filter((name) => name.startsWith("reward/") && !SPREAD.has(name));
  const held = names.filter((name) => /^eval\/score\/./.test(name));
  return [
    ["Reward by scorer", scores, "mean of each score over the step's episodes"],
    ["Reward by task", tasks, "mean reward of each task's episodes"],
    ["Held-out score by task", held, "mean reward of each task's held-out samples"],
  ].filter(([, found]) => found.length > 1);
}
