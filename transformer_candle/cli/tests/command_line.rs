//! The program as a shell sees it: exit codes, what goes to stdout and what to stderr.

#[path = "../../training/tests/support/program.rs"]
mod program;

use program::{answers_help_and_version, refused};

const TRANSFORMER_CANDLE: &str = env!("CARGO_BIN_EXE_transformer-candle");

#[test]
fn what_cannot_be_done_is_one_sentence_and_exit_code_2() {
    for (arguments, name) in [
        (["train", "--config", "no.yaml"].as_slice(), "no.yaml"),
        (&["plan", "--config", "no.toml"], "no.toml"),
        (&["bench", "--config", "no.json"], "no.json"),
        (&["generate", "--checkpoint", "nowhere", "--prompt", "x"], "nowhere"),
        (&["generate", "--experiment", "nobody", "--prompt", "x"], "nobody"),
        (&["generate", "--experiment", "../up", "--prompt", "x"], "../up"),
        (&["generate", "--checkpoint", "d", "--prompt", "x", "--temperature=-1"], "temperature"),
        (&["evaluate", "--checkpoint", "nowhere"], "nowhere"),
        (&["checkpoint", "list", "nowhere"], "nowhere"),
        (&["checkpoint", "verify", "--experiment", "nobody"], "nobody"),
    ] {
        let message = refused(TRANSFORMER_CANDLE, arguments, 2);
        assert!(message.contains(name), "{message}");
        assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    }
    refused(TRANSFORMER_CANDLE, &["train"], 2);
}

#[test]
fn a_wrong_command_line_gets_one_sentence() {
    let advice = "`transformer-candle plan --help` lists what there is";
    for (arguments, expected) in [
        (
            ["plan", "--gpuu", "x"].as_slice(),
            format!("unexpected argument '--gpuu' found; tip: a similar argument exists: '--gpu'; {advice}"),
        ),
        (&["plan", "a", "b"], format!("unexpected argument 'b' found; {advice}")),
        (&["plan", "--gpu"], "a value is required for '--gpu <NAME>' but none was supplied".to_owned()),
        (&["plan", "--json", "--json"], "the argument '--json' cannot be used multiple times".to_owned()),
        (&["generate", "a"], "--prompt <TEXT> or --prompt-file <FILE> is missing".to_owned()),
        (
            &["trian"],
            "unrecognized subcommand 'trian'; tip: a similar subcommand exists: 'train'; `transformer-candle --help` lists \
             what there is"
                .to_owned(),
        ),
    ] {
        assert_eq!(refused(TRANSFORMER_CANDLE, arguments, 2), format!("error: {expected}\n"), "{arguments:?}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    answers_help_and_version(TRANSFORMER_CANDLE);
}
