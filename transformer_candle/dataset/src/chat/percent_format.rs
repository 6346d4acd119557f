//! Python's `'%s' % value` in a chat template: the operator `%` of strings, which minijinja has for numbers only.
//!
//! Before a template is compiled, `'...' % value` becomes `'...' | percent(value)` where the left side is a string in
//! quotes or a variable. The filter takes the same left side as `%` does, unless the variable is itself the right side
//! of an operator that binds as tightly, which is left as it is.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::python_text;

/// The name of the filter that computes `%`.
pub(super) const FILTER: &str = "percent";

/// Operators that bind as tightly as `%` or tighter, and so may own a variable on their right.
const TIGHTER: [&str; 4] = ["*", "/", "%", "-"];

/// A piece of an expression between `{{` and `}}`, or `{%` and `%}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    String(&'a str),
    /// A name or a number, with the attributes and items behind it.
    Operand(&'a str),
    /// White space.
    Space(&'a str),
    /// Anything else, a character at a time; brackets with what they hold are part of an operand before them.
    Other(&'a str),
}

/// Replaces the operator `%` of strings and variables in a template's tags by the filter.
pub(super) fn with_percent_filter(source: &str) -> String {
    let (mut program, mut rest) = (String::with_capacity(source.len()), source);
    while let Some((start, close)) = next_tag(rest) {
        let (before, tag) = rest.split_at(start + 2);
        program.push_str(before);
        let end = end_of_tag(tag, close);
        program.push_str(&rewritten(&tag[..end]));
        rest = &tag[end..];
    }
    program.push_str(rest);
    program
}

/// Returns the start of the next tag, and what closes it. Comments are skipped.
fn next_tag(text: &str) -> Option<(usize, &'static str)> {
    let mut from = 0;
    loop {
        let start = from + text[from..].find('{')?;
        match text.as_bytes().get(start + 1) {
            Some(b'{') => return Some((start, "}}")),
            Some(b'%') => return Some((start, "%}")),
            Some(b'#') => from = text[start..].find("#}").map(|end| start + end + 2)?,
            _ => from = start + 1,
        }
    }
}

/// Returns where the expression of a tag ends: at `close` outside strings.
fn end_of_tag(tag: &str, close: &str) -> usize {
    let mut position = 0;
    while position < tag.len() && !tag[position..].starts_with(close) {
        position += first_token(&tag[position..]).text().len();
    }
    position
}

impl<'a> Token<'a> {
    fn text(self) -> &'a str {
        let (Self::String(text) | Self::Operand(text) | Self::Space(text) | Self::Other(text)) = self;
        text
    }
}

/// Returns the first token of a text that is not empty. Operands end before their attributes and brackets.
fn first_token(text: &str) -> Token<'_> {
    let first = text.chars().next().unwrap_or_default();
    let span = |belongs: fn(char) -> bool| text.find(|character| !belongs(character)).unwrap_or(text.len());
    match first {
        '\'' | '"' => {
            let mut escaped = false;
            let end = text.char_indices().skip(1).find(|&(_, character)| {
                let closes = character == first && !escaped;
                escaped = character == '\\' && !escaped;
                closes
            });
            Token::String(&text[..end.map_or(text.len(), |(index, _)| index + 1)])
        }
        _ if first.is_whitespace() => Token::Space(&text[..span(char::is_whitespace)]),
        _ if is_word(first) => Token::Operand(&text[..span(is_word)]),
        _ => Token::Other(&text[..first.len_utf8()]),
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Returns the length of what follows an operand and belongs to it: `.name`, `[item]`, `(arguments)`.
fn postfix(text: &str) -> usize {
    let mut length = 0;
    loop {
        let rest = &text[length..];
        length += match rest.as_bytes().first() {
            Some(b'[' | b'(') => bracketed(rest),
            Some(b'.') => 1 + first_token(&rest[1..]).text().len(),
            _ => return length,
        };
        if length >= text.len() {
            return text.len();
        }
    }
}

/// Returns the length of the bracket that a text starts with and of all it holds.
fn bracketed(text: &str) -> usize {
    let (mut depth, mut position) = (0_usize, 0);
    while position < text.len() {
        let token = first_token(&text[position..]);
        position += token.text().len();
        match token {
            Token::Other("(" | "[" | "{") => depth += 1,
            Token::Other(")" | "]" | "}") => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    position
}

/// Rewrites the expression of a tag.
fn rewritten(expression: &str) -> String {
    let (mut output, mut position) = (String::with_capacity(expression.len()), 0);
    // Whether the last token but white space is a left side of `%`, and what stands before it.
    let (mut is_left, mut before) = (false, "");
    let mut last = "";
    while position < expression.len() {
        let token = first_token(&expression[position..]);
        position += token.text().len();
        match token {
            Token::Space(space) => output.push_str(space),
            Token::Other("%") if is_left && (last.starts_with(['\'', '"']) || !TIGHTER.contains(&before)) => {
                let spaces = expression[position..].len() - expression[position..].trim_start().len();
                position += spaces;
                let right = operand(&expression[position..]);
                let argument = rewritten(&expression[position..position + right]);
                output.extend(["|", FILTER, "(", &argument, ")"]);
                position += right;
                (is_left, before, last) = (false, "", "");
            }
            Token::String(text) | Token::Operand(text) => {
                let attributes = postfix(&expression[position..]);
                output.push_str(text);
                output.push_str(&rewritten_brackets(&expression[position..position + attributes]));
                position += attributes;
                let is_keyword = ["in", "is", "not", "and", "or", "if", "else", "set", "elif"].contains(&text);
                (is_left, before, last) = (!is_keyword, last, text);
            }
            Token::Other(text) => {
                output.push_str(text);
                (is_left, last) = (false, text);
            }
        }
    }
    output
}

/// Rewrites what is inside of the brackets of an operand's items and arguments.
fn rewritten_brackets(attributes: &str) -> String {
    if attributes.contains('%') { rewritten(attributes) } else { attributes.to_owned() }
}

/// Returns the length of the right side of `%`: a value with its attributes and filters.
fn operand(text: &str) -> usize {
    let mut length = match first_token(text) {
        Token::Other("(" | "[" | "{") => bracketed(text),
        token => token.text().len(),
    };
    length += postfix(&text[length..]);
    loop {
        let rest = &text[length..];
        let after = rest.trim_start();
        let Some(filter) = after.strip_prefix('|') else { return length };
        let filter = filter.trim_start();
        let name = first_token(filter).text().len();
        length = text.len() - filter.len() + name;
        length += postfix(&text[length..]);
    }
}

/// Computes `left % right`: printf-style formatting of a string, else the remainder of numbers.
pub(super) fn apply(state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
    if left.kind() == ValueKind::String {
        let values = match right.kind() {
            ValueKind::Seq => right.try_iter()?.collect(),
            _ => vec![right.clone()],
        };
        let printed = values.into_iter().map(|value| match value.kind() {
            ValueKind::String | ValueKind::Number | ValueKind::Map => Ok(value),
            _ => python_text::str(&|fuel| state.consume_fuel(fuel), &value).map(Value::from),
        });
        let arguments: Vec<Value> = std::iter::once(Ok(left.clone())).chain(printed).collect::<Result<_, Error>>()?;
        return state.apply_filter("format", &arguments);
    }
    let remainder = match (i64::try_from(left.clone()), i64::try_from(right.clone())) {
        (Ok(left), Ok(right)) => left.checked_rem_euclid(right).map(Value::from),
        _ => match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
            (Ok(left), Ok(right)) => Some(Value::from(left.rem_euclid(right))),
            _ => None,
        },
    };
    remainder.ok_or_else(|| {
        let message = format!("cannot compute {} % {}", left.kind(), right.kind());
        Error::new(ErrorKind::InvalidOperation, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> String {
        let mut environment = minijinja::Environment::new();
        environment.add_filter(FILTER, |state: &mut State, left: Value, right: Value| apply(state, &left, &right));
        let message = serde_json::json!({"role": "user", "content": "50% off", "n": 7, "none": null});
        let context = minijinja::value::Serde(serde_json::json!({"m": message, "f": "<%s>", "numbers": [1, 2, 3]}));
        environment.render_str(&with_percent_filter(source), context).unwrap()
    }

    #[test]
    fn strings_format_as_in_python() {
        for (source, expected) in [
            ("{{ '%s: %s' % (m.role, m.content) }}", "user: 50% off"),
            ("{{ '<|%s|>' % m.role }}{{ m['content'] }}", "<|user|>50% off"),
            ("{{ '%s' % m['role']|upper + '!' }}", "USER!"),
            ("{{ f % m.role }}", "<user>"),
            ("{{ '%d of %05.1f%%' % (m.n, 2.5) }}", "7 of 002.5%"),
            ("{{ '%s' % m.none }}", "None"),
            ("{% set t = '[%s]' % (f % m.role) %}{{ t }}", "[<user>]"),
            ("{{ '%s' | format(m.role) }}", "user"),
        ] {
            assert_eq!(render(source), expected, "{source}");
        }
    }

    #[test]
    fn numbers_keep_their_remainder() {
        for (source, expected) in [
            ("{{ m.n % 2 }}", "1"),
            ("{% if (numbers|length) % 2 == 1 %}odd{% endif %}", "odd"),
            ("{% for n in numbers %}{% if loop.index0 % 2 == 0 %}{{ n }}{% endif %}{% endfor %}", "13"),
            ("{{ 3 * m.n % 4 }}", "1"),
            ("{{ 9 % m.n % 2 }}", "0"),
        ] {
            assert_eq!(render(source), expected, "{source}");
        }
    }

    #[test]
    fn everything_else_stays_as_it_is() {
        let source = "100 % a {# '%s' % x #}{%- if '%' in m -%} %{% endif %}{{ 'it\\'s %' }}{{ {'a': [1]}['a'] }}";
        assert_eq!(with_percent_filter(source), source);
    }
}
