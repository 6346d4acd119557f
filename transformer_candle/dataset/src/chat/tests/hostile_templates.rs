//! Templates that would exhaust the stack, the memory or the time of the program.

use super::*;

/// Runs a test on the stack of a thread that reads data.
fn on_a_small_stack(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(3 << 19).spawn_scoped(scope, test).unwrap();
        thread.join().unwrap();
    });
}

/// Returns why a template is refused.
fn refusal(template: &str) -> String {
    match model(Some(template)).encoder(&settings()).err() {
        Some(DataError::ChatTemplate { message, .. }) => message,
        other => panic!("{}...: {other:?}", &template[..template.floor_char_boundary(100)]),
    }
}

fn assert_refused(cases: &[(String, &str)]) {
    on_a_small_stack(|| {
        for (template, expected) in cases {
            // Behind the conversation, so that the template is like one that works.
            let message = refusal(&format!("{PLAIN}{template}"));
            let start = &template[..template.floor_char_boundary(200)];
            assert!(message.contains(expected), "{start}: {message}");
            assert!(message.len() < 1200, "{start}: {} bytes", message.len());
        }
    });
}

#[test]
fn deep_sources_are_refused_before_they_are_parsed() {
    let nested = |open: &str, inner: &str, close: &str| {
        format!("{{{{ {}{inner}{} }}}}", open.repeat(99_999), close.repeat(99_999))
    };
    let chain = |first: &str, next: &str| format!("{{{{ {first}{} }}}}", next.repeat(100_000));
    let blocks = |open: &str, close: &str| format!("{}{}", open.repeat(9_999), close.repeat(9_999));
    let mut cases: Vec<(String, &str)> =
        [("(", "1", ")"), ("[", "", "]"), ("{1:", "1", "}"), ("f(", "", ")"), ("a[", "1", "]")]
            .map(|(open, inner, close)| (nested(open, inner, close), "24 brackets"))
            .to_vec();
    cases.push((nested("f(a, ", "1", ")"), "24 brackets"));
    cases.push((format!("{{{{ {}", "(".repeat(99_999)), "24 brackets"));
    cases.push((format!("{{{{ 'a' % {}1{} }}}}", "('a' % ".repeat(9_999), ")".repeat(9_999)), "24 brackets"));
    for (first, next) in [
        ("1", " + 1"),
        ("'a'", " ~ 'a'"),
        ("1", " == 1"),
        ("a", " and a"),
        ("a", "|trim"),
        ("a", ".a"),
        ("a", "[0]"),
        ("a", "()"),
        ("a", " is a"),
        ("", "not "),
        ("", "- "),
        ("a", " if a else"),
        ("1", " if 1"),
        ("'a'", " 'a'"),
        ("'a'", " % 'a'"),
        ("2", " ** 2"),
        ("[a, b]", " + [a, b]"),
    ] {
        cases.push((chain(first, next), "more than 400 operators and operands"));
    }
    cases.push((chain("", "f(a) ~ "), "more than 400"));
    cases.push((blocks("{% if 1 %}", "{% endif %}"), "recursion"));
    cases.push((blocks("{% for a in b %}", "{% endfor %}"), "recursion"));
    cases.push((blocks("{% filter trim %}", "{% endfilter %}"), "recursion"));
    cases.push((blocks("{% macro a() %}", "{% endmacro %}"), "recursion"));
    cases.push((format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(50_000)), "200 `elif`s"));
    cases.push(("a".repeat(2 << 20), "at most 1048576"));
    assert_refused(&cases);
}

#[test]
fn templates_without_an_end_are_refused() {
    let too_much = "far more than a conversation of this size needs";
    let looped = |body: &str| {
        format!("{{% for a in range(99999) %}}{{% for b in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}")
    };
    let cases = [
        (looped(""), too_much),
        (looped("{{ 'a' }}"), too_much),
        ("{{ 'a'|indent(10**11, true) }}".to_owned(), too_much),
        ("{{ 'a\nb'|indent(10**11) }}".to_owned(), too_much),
        ("{{ messages|tojson(indent=10**11) }}".to_owned(), "`tojson` is to indent by 100000000000"),
        ("{{ messages|tojson(indent='a' * 1000) }}".to_owned(), "`tojson` is to indent by"),
        ("{{ 'a'.center(10**11) }}".to_owned(), ""),
        ("{{ 'a'.ljust(10**11) }}".to_owned(), ""),
        ("{{ 'a'.zfill(10**11) }}".to_owned(), ""),
        ("{{ '%99999999999d' % 1 }}".to_owned(), ""),
        ("{{ '%*d' % (99999999999, 1) }}".to_owned(), ""),
        ("{{ '{:>99999999999}'.format(1) }}".to_owned(), too_much),
        ("{{ 'a' * 10**11 }}".to_owned(), ""),
        ("{{ 'a' * 90000000 }}".to_owned(), too_much),
        ("{{ [1] * 90000000 }}".to_owned(), "it repeats a list"),
        ("{{ ([[1] * 9999] * 9999) ~ '' }}".to_owned(), "it repeats a list"),
        ("{{ ([[1] * 9999] * 9999)|tojson }}".to_owned(), "it repeats a list"),
        ("{{ ([[1] * 9999] * 9999)|string }}".to_owned(), "it repeats a list"),
        ("{% set a = [[1] * 99999] * 99999 %}{{ a == a }}".to_owned(), "it repeats a list"),
        ("{{ 3 * messages|list|length * messages[:] }}".to_owned(), "it repeats a list"),
        ("{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format('a' * 9999999) }}".to_owned(), too_much),
        (
            format!(
                "{{% set a = [messages{}] %}}{{% set a = [a{}] %}}{{{{ a ~ a }}}}",
                ", messages".repeat(9999),
                ", a".repeat(9999)
            ),
            too_much,
        ),
        (format!("{{% set a = 'a' * 999999 %}}{{{{ [a{}]|join }}}}", ", a".repeat(9999)), too_much),
        ("{{ range(10**11)|list }}".to_owned(), ""),
        ("{{ range(99999)|join('a' * 99999) }}".to_owned(), too_much),
        ("{{ ('a' * 99999).replace('a', 'a' * 99999) }}".to_owned(), too_much),
        ("{{ ('a' * 99999)|replace('a', 'a' * 99999) }}".to_owned(), too_much),
        ("{{ ('a' * 99999)|replace('', 'a' * 99999) }}".to_owned(), too_much),
        ("{{ 9 ** 9 ** 9 ** 9 }}".to_owned(), ""),
        (
            "{% set n = namespace(a='a') %}{% for b in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}".to_owned(),
            too_much,
        ),
        (
            "{% set n = namespace(a='a') %}{% for b in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}".to_owned(),
            too_much,
        ),
        (
            "{% set n = namespace(a=[1]) %}{% for b in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}".to_owned(),
            too_much,
        ),
        (
            "{% set n = namespace(a=[1]) %}{% for b in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}".to_owned(),
            too_much,
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(), "recursion limit"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}".to_owned(), "recursion limit"),
        ("{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}".to_owned(), ""),
        ("{{ raise_exception('a' * 9999999) }}".to_owned(), "aaa..."),
    ];
    assert_refused(&cases);
}

#[test]
fn values_that_hold_themselves_are_refused() {
    let itself = "sets an attribute of a namespace to a namespace";
    let cases = [
        ("{% set n = namespace() %}{% set n.a = n %}{{ n }}", itself),
        ("{% set n = namespace() %}{% set n.a = [n] %}{{ n|tojson }}", itself),
        ("{% set n = namespace() %}{% set n.a = {'b': [n]} %}{{ n == n.a }}", itself),
        ("{% set n = namespace() %}{% set n.a = {n: 1} %}", itself),
        ("{% set n = namespace() %}{% set n.a, n.b = 1, n %}", itself),
        ("{% set n = namespace() %}{% set (n.a, n.b) = (n, 1) %}", itself),
        ("{% set n = namespace() %}{% set n.a | default(n, true) %}{% endset %}", itself),
        ("{% set n = namespace() %}{%- set n.a = n -%}", itself),
        ("{% set n = namespace() %}{% set n . a = 1 and n %}", itself),
        ("{% set n, m = namespace(), namespace() %}{% set n.a = m %}{% set m.a = n %}{{ n == m }}", itself),
        ("{% set n = namespace() %}{% set n.a = namespace(b=n) %}", itself),
        ("{% set n = namespace() %}{% macro f() %}{{ n }}{% endmacro %}{% set n.a = f %}", "to a function or a loop"),
        ("{% set n = namespace() %}{% for a in [n] %}{% set n.a = loop %}{% endfor %}", "to a function or a loop"),
    ];
    assert_refused(&cases.map(|(template, expected)| (template.to_owned(), expected)));
}

#[test]
fn values_that_grow_deep_are_refused() {
    let deep = "more than 200 lists and dictionaries in each other";
    let shared = "far more than";
    let lines = |line: &str| format!("{{% set a = [1] %}}{}", line.repeat(9_999));
    let cases = [
        (lines("{% set a = [a] %}"), deep),
        (lines("{% set a = {1: a} %}"), deep),
        (lines("{% set a = (a,) %}"), deep),
        (lines("{% set a = [a, a] %}"), shared),
        (lines("{%- set a, b = [a], [a] -%}"), deep),
        ("{% set n = namespace(a=[]) %}{% for b in range(99999) %}{% set n.a = [n.a] %}{% endfor %}".to_owned(), deep),
        (
            "{% set n = namespace(a=[]) %}{% for b in range(99999) %}{% set n.a = {'a': n.a} %}{% endfor %}".to_owned(),
            deep,
        ),
        (
            "{% set n = namespace(a=[]) %}{% for b in range(99999) %}{% set n.a = n.a|batch(1)|list %}{% endfor %}"
                .to_owned(),
            "",
        ),
        ("{% macro f(a, n=[]) %}{{ f([[[[[[[[a]]]]]]]]) }}{% endmacro %}{{ f([]) }}".to_owned(), deep),
        ("{% macro f(n, a) %}{{ f(n, [a, a]) if n }}{% endmacro %}{{ f(1, []) }}".to_owned(), "r"),
        ("{% for a in [[1]] recursive %}{{ loop([[a, a]]) }}{% endfor %}".to_owned(), "r"),
        ("{% for a in [[1]] recursive %}{{ loop([[[[[[[[a]]]]]]]]) }}{% endfor %}".to_owned(), "r"),
        (
            format!(
                "{{% set a0 = [1] %}}{}",
                (0..99).map(|n| format!("{{% with a{0} = [a{n}, a{n}] %}}", n + 1)).collect::<String>()
                    + &"{% endwith %}".repeat(99)
            ),
            "r",
        ),
    ];
    assert_refused(&cases);
}

#[test]
fn deep_but_allowed_templates_render_on_a_small_stack() {
    let brackets = format!("{{% if {}1{} %}}{{% endif %}}", "[".repeat(23), "]".repeat(23));
    let chain = format!("{{% if 0{} %}}{{% endif %}}", " + 1".repeat(190));
    let blocks = format!("{}{}", "{% if 1 %}".repeat(100), "{% endif %}".repeat(100));
    let elifs = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(200));
    let calls =
        "{% macro f(n, a) %}{% if n %}{{ f(n - 1, [a]) }}{% endif %}{% endmacro %}{% if f(30, []) %}{% endif %}"
            .to_owned();
    let lists = "{% set n = namespace(a=1) %}{% for b in range(199) %}{% set n.a = [n.a] %}{% endfor %}\
                 {% set a = n.a|tojson ~ n.a ~ debug() %}{% if n.a == [n.a] or [n.a, n.a]|sort|unique|list %}{% endif %}"
        .to_owned();
    on_a_small_stack(move || {
        for template in [brackets, chain, blocks, elifs, calls, lists] {
            let template = format!("{PLAIN}{template}");
            let model = model(Some(&template));
            if let Err(error) = model.encoder(&settings()) {
                panic!("{template}: {error}");
            }
        }
    });
}

#[test]
fn a_row_that_a_template_cannot_finish_is_skipped() {
    let loops = format!(
        "{PLAIN}{{% if 'LOOP' in messages[0].content %}}{{% for a in range(99999) %}}{{% for a in range(99999) %}}{{% endfor %}}{{% endfor %}}{{% endif %}}"
    );
    let deep = format!(
        "{PLAIN}{{% set n = namespace(a=1) %}}{{% for a in messages[0].content %}}{{% set n.a = [n.a] %}}{{% endfor %}}"
    );
    on_a_small_stack(|| {
        for (template, hostile) in [(loops, "LOOP".to_owned()), (deep, "a".repeat(9999))] {
            let encoder = model(Some(&template)).usual();
            let row = |text: &str| json!({"messages": turns(&[("user", text), ("assistant", "b")])}).to_string();
            assert!(encoder.encode_row(&row("a")).unwrap().is_ok());
            assert_eq!(encoder.encode_row(&row(&hostile)).unwrap().unwrap_err(), SkipReason::Template);
            assert!(
                encoder.first_problem().unwrap().contains("refuses it: it says: it "),
                "{:?}",
                encoder.first_problem()
            );
            assert!(encoder.encode_row(&row("a")).unwrap().is_ok(), "the next row is read");
        }
    });
}

#[test]
fn long_conversations_render() {
    let many = [("user", "a"), ("assistant", "b")].repeat(1_000);
    let text = "text ".repeat(20_000);
    let large = [("user", text.as_str()), ("assistant", text.as_str())].repeat(10);
    // As gpt-oss's, which looks for an answer among all messages that follow a call.
    let quadratic = format!(
        "{PLAIN}{{% for message in messages %}}{{% for next in messages[loop.index:] %}}\
         {{% if next.role == 'assistant' and 'x' in next %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    );
    let joined = format!(
        "{{% set n = namespace(text='', messages=[]) %}}{{% for message in messages %}}\
         {{% set n.messages = n.messages + [message] %}}{{% endfor %}}{PLAIN}{{{{ '' if n.messages|tojson else '' }}}}"
    );
    for template in [PLAIN, &quadratic, &joined, "chatml", "qwen3"] {
        let is_built_in = ["chatml", "qwen3"].contains(&template);
        let model = model((!is_built_in).then_some(template));
        let chat_settings = ChatSettings { template: is_built_in.then(|| template.into()), ..settings() };
        let encoder = model.encoder(&chat_settings).unwrap();
        for messages in [&many, &large] {
            let messages: Vec<Value> = turns(messages).as_array().unwrap().clone();
            if let Err(error) = encoder.encode_prompt(&messages) {
                panic!("{template}: {error}");
            }
        }
    }
}
