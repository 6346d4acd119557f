//! Parsing of the command line, which refuses empty values.

use std::ffi::OsString;
use std::io::Write;
use std::process;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ArgMatches;
use clap::{Command, CommandFactory, FromArgMatches};

use super::output::delivered;
use crate::{Result, TrainerError};

/// Options that may be empty: an empty prompt starts a new text.
const MAY_BE_EMPTY: [&str; 1] = ["prompt"];

/// The last line of clap's messages.
const HELP_ADVICE: &str = "For more information, try '--help'.";

/// Parses the command line of this process. Help and version are printed here, and end the program.
///
/// # Errors
/// Those of [`parse_from`].
pub(super) fn parse<C: CommandFactory + FromArgMatches>() -> Result<C> {
    let mut command = C::command();
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    if let Err(help) = &matches
        && (!help.use_stderr() || help.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand)
    {
        delivered(help.print().and_then(|()| std::io::stdout().flush()))?;
        process::exit(0);
    }
    validate(command, matches)
}

/// Parses `words`, the first of which is the program's name. Help and version are refused as well.
///
/// # Errors
/// [`TrainerError::Request`] for what cannot be understood, and for a value that is empty, as a shell variable
/// is that was never set: an empty path would be the current folder.
pub fn parse_from<C: CommandFactory + FromArgMatches>(words: impl IntoIterator<Item = OsString>) -> Result<C> {
    let mut command = C::command();
    let matches = command.try_get_matches_from_mut(words);
    validate(command, matches)
}

fn validate<C: FromArgMatches>(mut command: Command, matches: clap::error::Result<ArgMatches>) -> Result<C> {
    let matches = matches.map_err(|error| refused(&error))?;
    refuse_empty(&command, &matches)?;
    C::from_arg_matches(&matches).map_err(|error| refused(&error.format(&mut command)))
}

/// Says in one sentence what clap says in several lines, of which the last ones are the usage and advice to ask for help.
fn refused(error: &clap::Error) -> TrainerError {
    let text = error.render().to_string();
    let (text, usage) = text.split_once("\n\nUsage: ").unwrap_or((&text, ""));
    let text = text.trim_start_matches("error: ").trim_end().trim_end_matches(HELP_ADVICE);
    let paragraphs = text.split("\n\n").map(|lines| lines.split_whitespace().collect::<Vec<_>>().join(" "));
    let mut parts: Vec<String> = paragraphs.filter(|text| !text.is_empty()).collect();
    match error.kind() {
        ErrorKind::MissingRequiredArgument => parts = vec![format!("{} is missing", alternatives(error))],
        // Of other errors the text itself says what is wrong with which value.
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            let command: Vec<&str> = usage.split(' ').take_while(|word| !word.starts_with(['-', '[', '<'])).collect();
            parts.push(format!("`{} --help` lists what there is", command.join(" ")));
        }
        _ => {}
    }
    TrainerError::Request(parts.join("; "))
}

/// `--prompt <TEXT> or --prompt-file <FILE>`: the required arguments that an error names.
fn alternatives(error: &clap::Error) -> String {
    let Some(ContextValue::Strings(names)) = error.get(ContextKind::InvalidArg) else {
        return "an argument".to_owned();
    };
    let without_brackets = |name: &String| match name.strip_prefix("<--").and_then(|name| name.strip_suffix('>')) {
        Some(group) => format!("--{group}").replace('|', " or "),
        None => name.clone(),
    };
    names.iter().map(without_brackets).collect::<Vec<_>>().join(" and ")
}

fn refuse_empty(command: &Command, matches: &ArgMatches) -> Result<()> {
    for argument in command.get_arguments() {
        let name = argument.get_long().map_or_else(|| argument.get_id().to_string(), |long| format!("--{long}"));
        let may_be_empty = argument.get_long().is_some_and(|long| MAY_BE_EMPTY.contains(&long));
        let mut values = matches.get_raw(argument.get_id().as_str()).into_iter().flatten();
        if !may_be_empty && values.any(|value| value.to_string_lossy().trim().is_empty()) {
            return Err(TrainerError::Request(format!(
                "{name} is empty: give it a value or leave it out (a shell variable that is not set is typed as nothing)"
            )));
        }
    }
    match matches.subcommand() {
        Some((name, matches)) => command.find_subcommand(name).map_or(Ok(()), |inner| refuse_empty(inner, matches)),
        None => Ok(()),
    }
}
