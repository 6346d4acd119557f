//! Stages: what each takes from the rest of the config, and what is refused.

use run_config::{BatchSize, Format, RunConfig, StageStart};

const BASE: &str = "
model: {hidden_size: 64, intermediate_size: 96, num_layers: 2, num_attention_heads: 4}
data: {sequence_length: 256, batch_size: 2, sequences_per_step: 8}
optimizer: {learning_rate: 1.0e-3}
scheduler: {min_lr: 1.0e-4}
";

fn parse(overrides: &[&str]) -> Result<RunConfig, String> {
    let overrides: Vec<_> = overrides.iter().map(|&text| text.to_owned()).collect();
    RunConfig::parse(BASE, Format::Yaml, &overrides).map_err(|error| error.to_string())
}

#[test]
fn a_stage_takes_what_it_leaves_out_from_the_sections() {
    let config =
        parse(&["stages=[{steps: 100}, {tokens: 30000, sequence_length: 512, batch_size: 4, learning_rate: 5.0e-4}, \
         {steps: 7, sequence_length: 128, tokens_per_step: 1024, at: window_end}]"])
        .unwrap();
    // 30,000 tokens are 7.3 steps of 8 x 512.
    assert_eq!(config.stage_ends(), [100, 108, 115]);
    assert_eq!(config.scheduler.total_steps, Some(115));
    assert_eq!(config.scheduler.warmup_steps, 5);
    assert_eq!(config.model.max_position_embeddings, 512);
    assert_eq!(config.longest_sequence(), 512);
    let stages = config.stage_configs();
    let batches: Vec<_> = stages
        .iter()
        .map(|stage| {
            let data = &stage.data;
            (data.sequence_length, data.sequences_per_step, data.batch_size, data.gradient_accumulation_steps)
        })
        .collect();
    assert_eq!(
        batches,
        [
            (256, 8, BatchSize::Fixed(2), Some(4)),
            (512, 8, BatchSize::Fixed(4), Some(2)),
            (128, 8, BatchSize::Fixed(2), Some(4))
        ]
    );
    assert!(stages.iter().all(|stage| stage.stages.is_none() && stage.scheduler.total_steps == Some(115)));
    let rates: Vec<_> = stages.iter().map(|stage| (stage.optimizer.learning_rate, stage.scheduler.min_lr)).collect();
    assert_eq!(rates, [(1e-3, 1e-4), (5e-4, 5e-5), (1e-3, 1e-4)]);
    assert_eq!(config.stages.as_ref().unwrap()[2].at, StageStart::WindowEnd);
    assert_eq!(config.at_stage(1), stages[1]);
    assert_eq!(config.at_stage(9), stages[2]);
}

#[test]
fn tokens_per_step_of_the_data_hold_in_every_stage() {
    let tokens = ["data.tokens_per_step=8192", "stages=[{steps: 1, sequence_length: 128}, {steps: 1}]"];
    let config = parse(&tokens).unwrap();
    let sequences: Vec<_> = config.stage_configs().iter().map(|stage| stage.data.sequences_per_step).collect();
    assert_eq!(sequences, [64, 32]);
}

#[test]
fn without_stages_there_is_one() {
    let config = parse(&["scheduler.total_steps=10"]).unwrap();
    assert_eq!((config.stage_configs(), config.stage_ends()), (vec![config.clone()], Vec::new()));
    assert_eq!(config.longest_sequence(), 256);
}

#[test]
fn weights_of_named_sources_replace_those_of_the_mixture() {
    let mixture = "data.mixture=[{dataset: a/b, weight: 0.7}, {name: code, shards: [c.txt], weight: 0.3}]";
    let stages = "stages=[{steps: 3}, {steps: 2, mixture: [{source: code, weight: 2}, {source: a/b, weight: 1}]}]";
    let config = parse(&[mixture, stages]).unwrap();
    let weights = |stage: usize| -> Vec<f64> {
        config.at_stage(stage).data.mixture.iter().map(|component| component.weight).collect()
    };
    assert_eq!((weights(0), weights(1)), (vec![0.7, 0.3], vec![1.0, 2.0]));
}

#[test]
fn a_filled_config_reads_back_the_same() {
    let config = parse(&[
        "data.mixture=[{dataset: a/b, weight: 0.7}, {name: code, shards: [c.txt], weight: 0.3}]",
        "stages=[{tokens: 30000, tokens_per_step: 4096}, {steps: 2, batch_size: auto, learning_rate: 5.0e-4, \
         mixture: [{source: code, weight: 2}]}]",
    ])
    .unwrap();
    for (text, format) in
        [(config.to_commented_yaml(), Format::Yaml), (serde_json::to_string(&config).unwrap(), Format::Json)]
    {
        assert_eq!(RunConfig::parse(&text, format, &[]).unwrap(), config, "{text}");
    }
}

#[test]
fn impossible_stages_are_refused_with_their_key() {
    const MIXTURE: &str = "data.mixture=[{dataset: a/b, weight: 0.7}, {shards: [c.txt], weight: 0.3}]";
    for (overrides, message) in [
        (&["stages=[]"][..], "stages: is an empty list"),
        (&["stages={steps: 3}"], "stages: is a section, but must be a list"),
        (&["stages=[8]"], "stages[0]: is 8, but must be a section"),
        (&["stages=[{}]"], "stages[0].steps: is missing: how long the stage lasts"),
        (&["stages=[{steps: 0}]"], "stages[0].steps: is 0"),
        (&["stages=[{step: 3}]"], "did you mean `stages[0].steps`"),
        (&["stages=[{steps: 3, tokens: 300}]"], "stages[0].tokens: is given, and so is steps"),
        (
            &["stages=[{steps: 3}, {steps: 4}]", "scheduler.total_steps=8"],
            "scheduler.total_steps: is 8, but the stages last 3 + 4 = 7 steps",
        ),
        (
            &["stages=[{steps: 3, batch_size: 3}]"],
            "stages[0].batch_size: is 3, which does not divide the stage's 8 sequences per step; 2 would",
        ),
        (
            &["stages=[{steps: 3, sequences_per_step: 5}]"],
            "stages[0].batch_size: is missing, and data.batch_size is 2, which does not divide the stage's 5",
        ),
        (
            &["stages=[{steps: 3, tokens_per_step: 1000}]"],
            "stages[0].tokens_per_step: is 1000, not a multiple of the stage's sequence_length 256",
        ),
        (
            &["stages=[{steps: 3, sequence_length: 300}]", "data.tokens_per_step=2048"],
            "stages[0].sequence_length: is 300, but data.tokens_per_step is 2048, not a multiple",
        ),
        (
            &["stages=[{steps: 3, tokens_per_step: 1024, sequences_per_step: 5}]"],
            "stages[0].tokens_per_step: is 1024, which makes 4 sequences of 256, but sequences_per_step is 5",
        ),
        (
            &["stages=[{steps: 3, sequence_length: 512}]", "model.max_position_embeddings=256"],
            "stages[0].sequence_length: is 512, more than model.max_position_embeddings 256",
        ),
        (&["stages=[{steps: 3, sequence_length: 1}]"], "stages[0].sequence_length: is 1"),
        (&["stages=[{steps: 3, learning_rate: 0}]"], "stages[0].learning_rate: is 0"),
        (&["stages=[{steps: 3, at: once}]"], "stages[0].at: is \"once\", but must be one of"),
        (&["stages=[{steps: 3, at: window_end}]"], "stages[0].at: is window_end, but the first stage"),
        (
            &[MIXTURE, "stages=[{steps: 3}, {steps: 3, at: window_end}]"],
            "stages[1].at: is window_end, but the windows of the sources of data.mixture end at different times",
        ),
        (
            &["stages=[{steps: 3, mixture: [{source: a/b, weight: 1}]}]"],
            "stages[0].mixture[0].source: \"a/b\" is no source: the run has no data.mixture",
        ),
        (
            &[MIXTURE, "stages=[{steps: 3, mixture: [{source: a/c, weight: 1}]}]"],
            "stages[0].mixture[0].source: \"a/c\" is no source of data.mixture; its sources are a/b",
        ),
        (
            &[MIXTURE, "stages=[{steps: 3, mixture: [{source: a/b, weight: 1}, {source: a/b, weight: 2}]}]"],
            "stages[0].mixture[1].source: \"a/b\" is named twice",
        ),
        (&[MIXTURE, "stages=[{steps: 3, mixture: [{source: a/b, weight: 0}]}]"], "stages[0].mixture[0].weight: is 0"),
        (
            &["stages=[{steps: 3}]", "scheduler.total_epochs=2", "scheduler.strategy=constant"],
            "scheduler.total_epochs: is 2, but stages last a number of steps",
        ),
        (
            &["stages=[{steps: 30}]", "scheduler.batch_warmup_steps=5"],
            "scheduler.batch_warmup_steps: is 5, but with stages each stage has one batch",
        ),
    ] {
        let error = parse(overrides).unwrap_err();
        assert!(error.contains(message), "{overrides:?} should be refused with {message:?}:\n{error}");
    }
}

#[test]
fn what_stages_contradict_is_told_once() {
    let error = parse(&["stages=[{steps: 3, batch_size: 3}, {steps: 4}]", "scheduler.total_steps=8"]).unwrap_err();
    assert_eq!(error.lines().count(), 1, "{error}");
    let error = parse(&["stages=[{steps: 3}]", "data.batch_size=3"]).unwrap_err();
    assert!(error.contains("data.batch_size") && !error.contains("stages"), "{error}");
}
