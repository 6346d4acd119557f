//! Generation with a key/value cache against whole passes.

use std::ops::ControlFlow;

use kernels::DType;
use model::{Error, Generator, ModelShape, SamplingSettings};

use crate::autograd::Tape;
use crate::models::{self, Batch, plain, relative_error, tiny, widened};

fn generator(shape: &ModelShape, max_tokens: usize) -> Generator {
    Generator::new(shape, &models::weights(shape, DType::F32), max_tokens).unwrap()
}

fn tokens(shape: &ModelShape, count: usize) -> Vec<u32> {
    Batch::drawn(shape, count, 0.0, 17).inputs
}

fn go_on(_token: u32) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn steps_prefill_and_candle_s_whole_pass_give_the_same_logits() {
    for shape in models::variants() {
        let prompt = tokens(&shape, 19);
        let whole: Vec<Vec<f64>> = Tape::new(&shape).logits(&prompt, 1).unwrap().to_vec2().unwrap();
        let mut stepwise = generator(&shape, 24);
        for (&token, expected) in prompt.iter().zip(&whole) {
            let logits = stepwise.step(token).unwrap();
            assert!(relative_error(&logits, expected) <= 1e-5);
        }
        let mut parts = generator(&shape, 24);
        parts.prefill(&prompt[..7]).unwrap();
        assert!(relative_error(&parts.prefill(&prompt[7..]).unwrap(), &whole[18]) <= 1e-5);
        parts.reset();
        assert!(relative_error(&parts.prefill(&prompt).unwrap(), &whole[18]) <= 1e-5);
    }
}

#[test]
fn long_prompts_have_the_losses_of_evaluation() {
    let shape = ModelShape { max_position_embeddings: 300, ..tiny(true) };
    let mut data = Batch::drawn(&shape, 290, 0.0, 23);
    data.targets.rotate_left(1);
    let (inputs, targets) = data.buffers();
    let mut decoder = models::decoder(&shape, &plain(1, 290));
    let losses = decoder.evaluate(&inputs, None, &targets).unwrap().read::<f32>().unwrap();
    let mut generator = generator(&shape, 1000);
    assert_eq!(generator.capacity(), 300);
    let loss = |logits: &[f32], target: i32| {
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        sum.ln() - f64::from(logits[target as usize])
    };
    for (from, to) in [(0, 200), (200, 201), (201, 289), (289, 290)] {
        let logits = generator.prefill(&data.inputs[from..to]).unwrap();
        let difference = loss(&logits, data.targets[to - 1]) - f64::from(losses[to - 1]);
        assert!(difference.abs() < 1e-5, "after {to} tokens: {difference}");
    }
}

#[test]
fn bf16_weights_generate_too() {
    let shape = tiny(true);
    let prompt = tokens(&shape, 12);
    let logits = |dtype| Generator::new(&shape, &models::weights(&shape, dtype), 24).unwrap().prefill(&prompt);
    let (exact, rough) = (logits(DType::F32).unwrap(), logits(DType::BF16).unwrap());
    assert!(relative_error(&rough, &widened(&exact)) < 0.03);
}

#[test]
fn logits_of_bf16_weights_are_not_rounded() {
    let shape = tiny(true);
    let weights = models::weights(&shape, DType::BF16);
    let logits = Generator::new(&shape, &weights, 24).unwrap().prefill(&tokens(&shape, 12)).unwrap();
    assert!(logits.iter().any(|logit| logit.to_bits() & 0xffff != 0), "close calls become ties");
}

#[test]
fn logits_of_each_token_are_those_of_prefixes() {
    let shape = ModelShape { max_position_embeddings: 300, ..tiny(true) };
    let prompt = tokens(&shape, 150);
    let each = generator(&shape, 300).logits_of_each(&prompt).unwrap();
    assert_eq!(each.len(), 150);
    for count in [1, 127, 128, 129, 150] {
        let prefix = widened(&generator(&shape, 300).prefill(&prompt[..count]).unwrap());
        assert!(relative_error(&each[count - 1], &prefix) <= 1e-5);
    }
}

#[test]
fn greedy_generation_takes_the_largest_logit_and_stops() {
    let shape = tiny(true);
    let prompt = tokens(&shape, 5);
    let mut reference = generator(&shape, 24);
    let mut logits = reference.prefill(&prompt).unwrap();
    let mut expected = Vec::new();
    for _ in 0..10 {
        let best = (0..71u32).max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize])).unwrap();
        expected.push(best);
        logits = reference.step(best).unwrap();
    }
    let greedy = SamplingSettings::greedy();
    let mut generator = generator(&shape, 24);
    assert_eq!(generator.generate(&prompt, 10, &[], &greedy, go_on).unwrap(), expected);
    assert_eq!(generator.generate(&prompt, 0, &[], &greedy, go_on).unwrap(), [0u32; 0]);

    let stop = expected[4];
    let prefix: Vec<u32> = expected.iter().copied().take_while(|&token| token != stop).collect();
    assert_eq!(generator.generate(&prompt, 10, &[stop], &greedy, go_on).unwrap(), prefix);

    let mut tokens = Vec::new();
    let three = |token| {
        tokens.push(token);
        if tokens.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert_eq!(generator.generate(&prompt, 10, &[], &greedy, three).unwrap(), expected[..3]);
    assert_eq!(tokens, expected[..3]);
}

#[test]
fn a_sequence_is_continued_behind_the_tokens_it_keeps() {
    let shape = tiny(true);
    let (first, greedy) = (tokens(&shape, 9), SamplingSettings::greedy());
    let mut second = first.clone();
    second[6] = (second[6] + 1) % 71;
    let expected = generator(&shape, 24).generate(&second, 8, &[], &greedy, go_on).unwrap();
    let mut generator = generator(&shape, 24);
    generator.generate(&first, 8, &[], &greedy, go_on).unwrap();
    assert_eq!(generator.past(), 9 + 8 - 1, "the last token is not read");
    generator.truncate(6);
    assert_eq!(generator.extend(&second[6..], 8, &[], &greedy, go_on).unwrap(), expected);
}

#[test]
fn generation_stops_at_the_context_length() {
    let shape = tiny(true);
    let mut generator = generator(&shape, usize::MAX);
    let prompt = tokens(&shape, 20);
    // The last token needs no room: nothing follows it.
    let completion = generator.generate(&prompt, 100, &[], &SamplingSettings::default(), go_on).unwrap();
    assert_eq!(completion.len(), 24 - 20 + 1);
    let full = generator.step(1).unwrap_err();
    assert!(matches!(full, Error::ContextFull { tokens: 25, capacity: 24 }), "{full}");
    generator.reset();
    assert!(matches!(generator.prefill(&tokens(&shape, 25)), Err(Error::ContextFull { .. })));
    assert!(matches!(generator.prefill(&[]), Err(Error::EmptyPrompt)));
    assert!(matches!(generator.prefill(&[3, 71]), Err(Error::UnknownToken { token: 71, .. })));
}

#[test]
fn a_seed_repeats_a_completion_and_another_does_not() {
    let shape = tiny(true);
    let mut generator = generator(&shape, 24);
    let prompt = tokens(&shape, 3);
    let mut with = |seed| {
        let settings = SamplingSettings { seed, ..SamplingSettings::default() };
        generator.generate(&prompt, 15, &[], &settings, go_on).unwrap()
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}
