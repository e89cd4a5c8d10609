"""Options that several commands share, as cli/declared.py reads them; a command may declare one in other words.

Arguments:
  trace TRACE: A trace file, or: {TRACES}.

Traffic:
  --arrival A: One of: {ARRIVALS}; gamma with ,cv=C: of its gaps.
  --rate R: Requests per second; the trace's own by default.
  --lengths L: Other lengths than the trace's: {LENGTHS}, {LENGTH_FORMS}, or a trace; then ,max_tokens=N for all.
  --num-requests N: How many requests to replay.
  --eos: Requests end at an EOS that no scheduler foresees; the default if --lengths names a workload.

Trace file:
  --time-unit s|ms|us|ns: Unit of the file's times, if its format has none.
  --columns ours=C,...: The trace's own columns, such as arrival=sent,input=num_in,output=num_out.
  --only model=NAME: Keep this model's rows of a log, or the rows with COLUMN=VALUE.
  --skip-bad: Leave bad rows out and count them.

Policy and profile:
  --policy SPEC: name[:value][,field=value...] or a TOML file.
  --profile P: A profile file, or one that `dsim profiles` lists.
  --workload W: The profile's commit model to draw from; its first by default.
  --frontend SECONDS: Time between client and engine, both directions; the profile's by default.
  --yield Y (yields): A yield in place of the profile's commit models: tokens a denoise step (3.2), per-forward:X,
      a .csv by threshold, or a step log.
  --ensemble N: Also use N profiles drawn from the profile's uncertainty; 19 or more give 90 % intervals.
  --check-rules: A rule of your own runs checked in Python to the end, not only at first.
  --allow-code FILE.py: A code file that a TOML file, a table or a run may load; repeat (docs/security.md).

Model and device:
  --random-weights CONFIG: Instead of --model: random weights for a config.json, or sdar-8b ... (docs/checkpoints.md).
  --device D: cuda or cpu; by default the GPU, if there is one.
  --graphs: Decode steps are captured CUDA graphs; the default on a GPU and of a data sheet.
  --mask-token-id N: The mask token's id, if the directory does not state it.
  --block-length N: The block that the directory's weights were trained with.
  --tokenizer PATH: tokenizer.json or its folder; the model's own by default.
  --tp N: With --gpu or --roofline: GPUs of a replica (tensor parallel).
  --weights W: With --gpu or --roofline: one of {WEIGHTS}; by default the checkpoint's.
  --kv K: With --gpu or --roofline: keys and values in bf16 or fp8.

Fleet and price:
  --replicas N: Replicas behind the router; by default the policy file's number, or 1.
  --router R: One of: {ROUTERS}; or your own: ./mine.py:ROUTER.
  --pool POOL (pools): [NAME:]COUNT@PROFILE,POLICY: a pool of the fleet, in place of --policy; repeat.
  --link LINK (links): BANDWIDTH[,LATENCY][,field=value...], such as 450GB/s,10us: from a prefill pool; repeat.
  --decider D: Which requests a prefill pool takes: {DECIDERS}[,tokens=N].
  --fleet FILE: A TOML file with pools, links, router, decider, scaler and startup.
  --gpu-hour PRICE: Price of one GPU per hour; adds costs to the result.
  --currency C: With --gpu-hour: currency of the price.

SLOs and quality:
  --slo SLO (slos): [class/][stat:]metric=bound: ttft=2s, 50ms/token, p90:tpot_chunk=50ms, chat/95%:ttft=2s; repeat.
  --fail-on-slo: With --slo: end with 1 if an SLO is missed; without a statistic, by over 1 % of requests.
  --attainment X%: Share of arrivals that must meet all SLOs without a statistic.
  --emit E: What reaches the client when: {EMIT}.
  --min-quality Q: Least quality relative to the full cache, such as 98%.
  --quality-table CSV: Your own scores instead of the published ones.

Execution:
  --seed S: Same seed, same bytes.
  --jobs N: Replays at once; by default all cores, on Ray all its CPUs.
  --ray ADDR: HOST:PORT of a running Ray cluster to replay on, or auto.

Output:
  -o, --out DIR: Write the run and report.html.
  --force: With --out: replace the output.
"""
