//! A chat template: Jinja as transformers runs it, in minijinja.

use std::path::PathBuf;
use std::sync::Arc;

use chrono::NaiveDate;
use minijinja::machinery::Token;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::Value as Json;

use super::bounded_values::{self, with_bounded_values};
use super::conversation::Messages;
use super::percent_format::{self, FILTER, with_percent_filter};
use super::row_variables::{RowVariables, TOOLS, TemplateVariables};
use super::special_tokens::{GENERATION, SpecialTokens};
use super::template_edits::Edits;
use super::template_limits::{self, MAX_RECURSION, visit_tags};
use super::{python_methods, python_text};

const NAME: &str = "chat_template";

/// A compiled chat template, with the variables that it is rendered with beside messages. Clones share the program.
#[derive(Clone)]
pub(super) struct ChatTemplate {
    /// The template's file, or `chatml`, to be named in error messages.
    pub origin: PathBuf,
    /// The template as it was read.
    pub source: String,
    /// Whether the template marks what the assistant says with `{% generation %}`.
    pub marks_generation: bool,
    environment: Arc<Environment<'static>>,
    /// Variables that name tokens, such as `bos_token`, with placeholders for special tokens.
    variables: Vec<(String, Value)>,
    pub special_tokens: SpecialTokens,
    /// Whether special tokens that messages spell become those tokens.
    pub parses_messages: bool,
}

impl ChatTemplate {
    /// Compiles a template; the message of an error says what is wrong with it.
    pub(super) fn compile(
        origin: PathBuf,
        source: String,
        named_tokens: &[(String, String)],
        special_tokens: SpecialTokens,
        date: Option<NaiveDate>,
    ) -> Result<Self, String> {
        template_limits::check_size(&source)?;
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|error| error.to_string())?;
        let (program, marks_generation) = with_generation_filter(&special_tokens.with_placeholders(&source), &syntax)?;
        template_limits::check_source(&program, &syntax)?;
        let program = with_bounded_values(&with_percent_filter(&program, &syntax)?, &syntax)?;
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_unknown_method_callback(python_methods::call);
        environment.set_formatter(python_text::format);
        environment.add_filter("tojson", |state: &mut State, value: Value, options| {
            python_text::tojson(&|fuel| state.consume_fuel(fuel), &value, options)
        });
        environment.add_filter("string", |state: &mut State, value: Value| {
            python_text::str(&|fuel| state.consume_fuel(fuel), &value)
        });
        bounded_values::add_filters(&mut environment);
        environment.add_filter("generation", |text: String| format!("{}{text}{}", GENERATION[0], GENERATION[1]));
        environment.add_filter(FILTER, |state: &mut State, left: Value, right: Value| {
            percent_format::apply(state, &left, &right)
        });
        environment.add_test("sequence", |value: &Value| is_container(value));
        environment.add_test("iterable", |value: &Value| is_container(value) || value.kind() == ValueKind::Iterable);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", move |format: String| strftime(date, &format));
        environment.add_template_owned(NAME, program).map_err(|error| special_tokens.with_names(&describe(&error)))?;
        let variable =
            |(name, token): &(String, String)| (name.clone(), Value::from(special_tokens.with_placeholders(token)));
        Ok(Self {
            origin,
            source,
            marks_generation,
            environment: Arc::new(environment),
            variables: named_tokens.iter().map(variable).collect(),
            special_tokens,
            parses_messages: false,
        })
    }

    /// Converts a conversation to values of the template, to be rendered as a whole or in part.
    pub(super) fn prepare(&self, conversation: &Messages) -> PreparedMessages {
        let prepared = |value: &Json| {
            let mut value = value.clone();
            if self.parses_messages {
                self.special_tokens.parse(&mut value);
            } else {
                self.special_tokens.break_up(&mut value);
            }
            Value::from(Serde(&value))
        };
        let of_row = conversation.variables.iter().map(|(name, value)| (name.clone(), prepared(value)));
        let of_row = of_row.chain(std::iter::once((TOOLS.to_owned(), prepared(&conversation.tools))));
        // A function such as `range` is looked up among the variables first.
        let is_function = |name: &str| self.environment.globals().any(|(function, _)| function == name);
        let not_given = conversation.other_fields.iter().filter(|name| !is_function(name)).cloned();
        let mut environment = (*self.environment).clone();
        let variables = conversation.variables.values().chain(std::iter::once(&conversation.tools));
        environment.set_fuel(Some(template_limits::fuel(&conversation.messages, variables)));
        PreparedMessages {
            environment,
            messages: conversation.messages.iter().map(prepared).collect(),
            of_row: Arc::new(RowVariables::new(of_row, not_given)),
        }
    }

    /// Renders the first `count` messages, with placeholders for special tokens; an error's text says why it cannot.
    pub(super) fn render(
        &self,
        conversation: &PreparedMessages,
        count: usize,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let rendered = self.try_render(conversation, count, add_generation_prompt);
        rendered
            .map(|text| self.special_tokens.finish(text))
            .map_err(|error| self.special_tokens.with_names(&describe(&error)))
    }

    fn try_render(&self, conversation: &PreparedMessages, count: usize, prompt: bool) -> Result<String, Error> {
        let own = [
            ("messages", Value::from(conversation.messages[..count].to_vec())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(prompt)),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        let others = own.chain(self.variables.iter().cloned()).collect();
        let variables = TemplateVariables { of_row: Arc::clone(&conversation.of_row), others };
        conversation.environment.get_template(NAME)?.render(Value::from_object(variables))
    }
}

/// Messages as values of a template.
pub(super) struct PreparedMessages {
    /// The template, with fuel for these messages.
    environment: Environment<'static>,
    messages: Vec<Value>,
    /// What else of the row the template can read, and whether it has.
    pub of_row: Arc<RowVariables>,
}

/// Whether a value is a sequence to Jinja: everything that has a length and items, strings and dictionaries too.
fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// Replaces transformers' `{% generation %}` by `{% filter generation %}`; also returns whether there was any.
fn with_generation_filter(source: &str, syntax: &SyntaxConfig) -> Result<(String, bool), String> {
    let (mut edits, mut has_tags) = (Edits::default(), false);
    visit_tags(source, syntax, |tag| {
        let word = tag.tokens.first().filter(|_| tag.is_statement);
        let replacement = match word {
            Some((Token::Ident("generation"), _)) => "filter generation",
            Some((Token::Ident("endgeneration"), _)) => "endfilter",
            _ => return Ok(()),
        };
        has_tags = true;
        edits.replace(tag.tokens[0].1.clone(), replacement);
        Ok(())
    })?;
    Ok((edits.apply(source), has_tags))
}

/// Formats the date of the config, which stands for today's; fails if the config has none.
fn strftime(date: Option<NaiveDate>, format: &str) -> Result<String, Error> {
    use std::fmt::Write as _;
    let problem = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    let date = date.ok_or_else(|| {
        problem("it names today's date: pin a day in data.chat_template_date, such as 2026-01-31".to_owned())
    })?;
    let mut text = String::new();
    write!(text, "{}", date.and_time(chrono::NaiveTime::MIN).format(format))
        .map_err(|_| problem(format!("strftime_now does not know the format {format:?}")))?;
    Ok(text)
}

/// Describes an error by its detail, which is the template's own message if the template raised it, and its line.
fn describe(error: &Error) -> String {
    let at = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    let detail = match error.kind() {
        ErrorKind::OutOfFuel => "it computes or writes far more than a conversation of this size needs".to_owned(),
        kind => error.detail().map_or_else(|| kind.to_string(), template_limits::shortened),
    };
    format!("{detail}{at}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_filters() {
        let source = "{%- generation -%}x{% endgeneration %}{% if generation %}{% endif %}{%-endgeneration-%}";
        let (program, has_tags) = with_generation_filter(source, &SyntaxConfig::default()).unwrap();
        let expected = "{%- filter generation -%}x{% endfilter %}{% if generation %}{% endif %}{%-endfilter-%}";
        assert_eq!((program.as_str(), has_tags), (expected, true));
    }

    #[test]
    fn the_date_is_the_config_s() {
        let day = NaiveDate::from_ymd_opt(2026, 1, 31);
        assert_eq!(strftime(day, "%d %b %Y %A").unwrap(), "31 Jan 2026 Saturday");
        assert!(strftime(None, "%Y").unwrap_err().to_string().contains("data.chat_template_date"));
        assert!(strftime(day, "%Q").is_err());
    }
}
