//! Tests of the stories: the engine on small grammars, and everything that the built-in grammar promises.
//!
//! Called by `cargo test` alone. What must stay true: each promise of the parent module has a test, and each check is
//! shown to be able to fail.

use super::{GRAMMAR, SOURCE, TEXT, check, grammar, grammar::Grammar, grammar::Symbol, parse, story, walk};
use std::collections::HashMap;

/// Every way to expand a small grammar: the text and its probability. Written on its own, without the engine's walks.
fn enumerate(grammar: &Grammar) -> Vec<(String, f64)> {
    struct State<'a> {
        text: String,
        probability: f64,
        held: HashMap<usize, usize>,
        todo: Vec<&'a Symbol>,
    }
    let start = Symbol::Choose { rule: 0, variable: None };
    let mut open = vec![State { text: String::new(), probability: 1.0, held: HashMap::new(), todo: vec![&start] }];
    let mut done = Vec::new();
    while let Some(mut state) = open.pop() {
        match state.todo.pop() {
            None => done.push((state.text, state.probability)),
            Some(Symbol::End) => open.push(state),
            Some(Symbol::Text(text)) => {
                state.text.push_str(text);
                open.push(state);
            }
            Some(Symbol::Recall { variable, form }) => {
                state.text.push_str(&grammar.list(*variable).alternatives[state.held[variable]].forms[*form]);
                open.push(state);
            }
            Some(Symbol::Choose { rule, variable }) => {
                let rule = &grammar.rules[*rule];
                let taken: Vec<usize> = rule.variables.iter().filter_map(|v| state.held.get(v).copied()).collect();
                let free = |index: &usize| variable.is_none() || !taken.contains(index);
                for index in (0..rule.alternatives.len()).filter(free) {
                    let alternative = &rule.alternatives[index];
                    let mut held = state.held.clone();
                    let mut probability = alternative.probability;
                    if let Some(variable) = variable {
                        held.insert(*variable, index);
                        probability = 1.0 / (rule.alternatives.len() - taken.len()) as f64;
                    }
                    let mut todo = state.todo.clone();
                    todo.extend(alternative.symbols.iter().rev());
                    open.push(State {
                        text: state.text.clone(),
                        probability: state.probability * probability,
                        held,
                        todo,
                    });
                }
            }
        }
    }
    done
}

const SMALL: &str = "
Story:
    {Start} {Middle} [Hero] and [friend] ate {food}.$
    (2) {Start} {Middle} [hero.He] slept.$
Start:
    [hero=name] saw [friend=name].
    [friend=name] was seen by [hero=name].
Middle:
    [third=name] came to [friend.him].
    (3) [friend] met [third=name] and ran to [hero.him].
food:
    (4) figs | cake
name / he, him:
    Tom | Benny / he, him
    Ann | Zoe / she, her
";

#[test]
fn a_small_grammar_is_enumerated() {
    let grammar = grammar::read(SMALL).unwrap();
    assert_eq!(check::clashes(&grammar), Vec::<String>::new());
    let all = enumerate(&grammar);
    let texts: HashMap<&str, f64> = all.iter().map(|(text, p)| (text.as_str(), *p)).collect();
    assert_eq!(texts.len(), all.len(), "two derivations write one text");
    assert_eq!(all.len(), (2 + 1) * 2 * 2 * 24);
    let expect = |f: &dyn Fn(&str, f64) -> f64| all.iter().map(|(text, p)| p * f(text, *p)).sum::<f64>();
    assert!((expect(&|_, _| 1.0) - 1.0).abs() < 1e-12);
    let measure = walk::measure(&grammar);
    assert!((expect(&|_, p| -p.log2()) - measure.bits).abs() < 1e-12);
    assert!((expect(&|text, _| text.len() as f64) - measure.bytes).abs() < 1e-12);
    assert!(all.iter().all(|(text, _)| text.len() <= measure.longest));
    for (text, p) in &all {
        assert!((walk::parse(&grammar, text).unwrap() + p.log2()).abs() < 1e-12, "{text}");
    }
    // What is written follows the probabilities: each text comes up about as often as it should.
    let stream = crate::random::Stream::new(1, crate::random::Purpose::Test);
    let count = 40_000;
    let mut seen: HashMap<String, f64> = HashMap::new();
    for i in 0..count {
        let mut draws = 0..;
        let (text, bits) = walk::write(&grammar, || stream.uniform_f64(i, draws.next().unwrap()));
        assert!((bits + texts[text.as_str()].log2()).abs() < 1e-12, "{text}");
        *seen.entry(text).or_default() += 1.0;
    }
    let chi_square: f64 = all
        .iter()
        .map(|(text, p)| {
            let expected = p * count as f64;
            (seen.get(text).copied().unwrap_or(0.0) - expected).powi(2) / expected
        })
        .sum();
    let freedom = all.len() as f64 - 1.0;
    assert!((chi_square - freedom).abs() < 4.0 * (2.0 * freedom).sqrt(), "chi square {chi_square} of {freedom}");
}

/// Whether a grammar of these rules is free of clashes.
fn clean(rules: &str) -> bool {
    check::clashes(&grammar::read(rules).unwrap()).is_empty()
}

#[test]
fn a_bad_grammar_is_caught() {
    // Plain prefixes, equal texts, and a prefix through a deeper choice.
    assert!(!clean("S:\n {a}!$\na:\n cat | cats"));
    assert!(!clean("S:\n {a}!$\na:\n cat | dog | cat"));
    assert!(!clean("S:\n {a}!$\na:\n a {b} | a big hen\nb:\n big | small"));
    assert!(clean("S:\n {a}!$\na:\n a {b} | a big hen\nb:\n bigger | small"));
    // The end of the story is a symbol: it parts texts that only the end parts.
    assert!(clean("S:\n {a}.$\n {a}. So it was.$\na:\n cat | dog"));
    assert!(!clean("S:\n {a}.$\n cat.$\na:\n cat | dog"));
    // A variable from before is the same on both sides, and may meet literal text or another variable.
    let names = "name:\n Tom | Ann | Tommy Lee | Zoe\n";
    let names_ok = "name:\n Tom | Ann | Lee | Zoe\n";
    assert!(!clean(&format!("S:\n [h=name] {{a}}$\na:\n [h] ran. | [h] sat.\n{names}")), "Tom, Tommy Lee");
    assert!(clean(&format!("S:\n [h=name] {{a}}$\na:\n [h] ran. | [h] sat.\n{names_ok}")));
    assert!(!clean(&format!("S:\n [h=name] {{a}}$\na:\n [h] ran. | Tom ran. He sat.\n{names_ok}")));
    assert!(clean(&format!("S:\n [h=name] {{a}}$\na:\n [h] ran. | Bob ran. He sat.\n{names_ok}")));
    assert!(
        clean(&format!("S:\n [h=name] [f=name] {{a}}$\na:\n [h] ran. | [f] ran.\n{names_ok}")),
        "hero is not friend"
    );
    // A fresh name, unlike a remembered one, may be the hero's again.
    assert!(!clean(&format!("S:\n [h=name] {{a}}$\na:\n [h] ran. | {{name}} ran.\n{names_ok}")));
    // Two alternatives that remember the same choice and recall it are told apart only by what follows.
    assert!(clean(&format!("S:\n [h=name] ran. [h] sat.$\n [h=name] ran. [h] fell.$\n{names_ok}")));
    assert!(!clean(&format!("S:\n [h=name] ran. {{a}}$\na:\n [h] or [f=name]. | [g=name] or {{name}}.\n{names_ok}")));
}

#[test]
fn a_grammar_out_of_shape_is_refused() {
    let refused = |rules: &str, why: &str| {
        let error = grammar::read(rules).map(|_| ()).unwrap_err();
        assert!(error.contains(why), "{error}");
    };
    refused("S:\n {a}$\na:\n x{S}", "contains itself");
    refused("S:\n {a}\na:\n x", "`$` ends");
    refused("S:\n {a}$\na:\n x$", "`$` ends");
    refused("S:\n {b}$", "no rule `b`");
    refused("S:\n [x] [x=a]$\na:\n b | c", "before it is chosen");
    refused("S:\n {T} [x]$\nT:\n [x=a] | none\na:\n b | c", "before it is chosen");
    refused("S:\n {T} [y=a]$\nT:\n [x=a] | none\na:\n b | c", "depends on the path");
    refused("S:\n [x=a] [x=a]$\na:\n b | c", "twice");
    refused("S:\n [x=a] [y=a] [z=a]$\na:\n b | c", "used up");
    refused("S:\n [x=a]$\na:\n b | (2) c", "equal weight");
    refused("S:\n [x=a] [x.he]$\na:\n b | c", "no form");
    refused("S:\n [x=a]$\na / he:\n b | c", "forms do not match");
    refused("S:\n {a}$\na:\n b\na:\n c", "defined twice");
    refused("S:\n {a}$\na:\n (0) b", "positive");
}

#[test]
fn every_choice_of_the_stories_is_prefix_free() {
    assert_eq!(check::clashes(&GRAMMAR), Vec::<String>::new());
    // The same check fails once a word is the start of another.
    let spoilt = TEXT.replacen("cat | dog |", "cat | catfish | dog |", 1);
    assert_ne!(spoilt, TEXT);
    assert!(!check::clashes(&grammar::read(&spoilt).unwrap()).is_empty());
}

#[test]
fn the_source_is_what_the_stories_show() {
    let count = 20_000;
    let stories: Vec<_> = (0..count).map(|index| story(7, index)).collect();
    let agree = |what: &str, computed: f64, values: &dyn Fn(&super::Story) -> f64| {
        let n = count as f64;
        let mean = stories.iter().map(values).sum::<f64>() / n;
        let variance = stories.iter().map(|s| (values(s) - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let error = (variance / n).sqrt();
        assert!((mean - computed).abs() < 3.0 * error, "{what}: {mean} sampled, {computed} computed, error {error}");
    };
    agree("bits", SOURCE.bits_per_story, &|story| story.bits);
    agree("bytes", SOURCE.bytes_per_story, &|story| story.text.len() as f64);
    assert!(stories.iter().all(|story| story.text.len() < SOURCE.longest));
    assert!(SOURCE.longest <= 450, "{}", SOURCE.longest);
    assert!((0.4..0.8).contains(&SOURCE.entropy_bpb()), "{}", SOURCE.entropy_bpb());
}

#[test]
fn a_story_is_read_back_and_an_altered_one_is_not() {
    let mut accepted = 0;
    for index in 0..5_000 {
        let story = story(3, index);
        let bits = parse(&story.text).expect(&story.text);
        assert!((bits - story.bits).abs() < 1e-9, "{}: {bits}, {}", story.text, story.bits);
        assert_eq!(parse(&story.text[..story.text.len() - 1]), None);
        assert_eq!(parse(&format!("{} ", story.text)), None);
        assert_eq!(parse(&story.text.replacen(". ", ".  ", 1)), None);
        // One letter changed: almost never another story (`cold` and `bold` are both words), never the same one.
        let at = (index as usize * 7919) % story.text.len();
        let letter = if story.text.as_bytes()[at] == b'b' { "c" } else { "b" };
        let altered = format!("{}{letter}{}", &story.text[..at], &story.text[at + 1..]);
        accepted += usize::from(parse(&altered).is_some());
    }
    assert!(accepted < 100, "{accepted} of 5000 altered texts are stories");
    assert_eq!(parse(""), None);
}

#[test]
fn a_recalled_name_that_differs_is_no_story() {
    let (mut index, mut tried) = (0, 0);
    while tried < 100 {
        let text = story(4, index).text;
        index += 1;
        let names: Vec<usize> = text.match_indices("Tom").map(|(at, _)| at).collect();
        if let [_, .., last] = names[..] {
            tried += 1;
            assert_eq!(parse(&format!("{}Ned{}", &text[..last], &text[last + 3..])), None, "{text}");
        }
    }
}

#[test]
fn stories_depend_on_seed_and_index_only() {
    assert_eq!(story(0, 5), story(0, 5));
    let differ = |a: (u64, u64), b: (u64, u64)| assert_ne!(story(a.0, a.1).text, story(b.0, b.1).text);
    differ((0, 0), (1, 0));
    differ((0, 0), (0, 1));
    differ((0, 0), (1 << 32, 0));
    let texts: std::collections::HashSet<_> = (0..20_000).map(|index| story(0, index).text).collect();
    assert_eq!(texts.len(), 20_000);
}

#[test]
fn stories_are_plain_tidy_text() {
    for index in 0..5_000 {
        let text = story(5, index).text;
        assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{text}");
        assert!(!text.contains("  ") && !text.contains(" .") && !text.contains(" ,"), "{text}");
        assert!(text.ends_with(['.', '!', '"']) && text.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
        assert!(text.matches('"').count().is_multiple_of(2), "{text}");
        for sentence in text.split(". ") {
            assert!(sentence.starts_with(|c: char| c.is_ascii_uppercase() || c == '"'), "{text}");
        }
        for vowel in ["a", "e", "i", "o", "u"] {
            assert!(!text.contains(&format!(" a {vowel}")) && !text.contains(&format!("A {vowel}")), "{text}");
        }
    }
}

/// The number of ways to make the choices that shape the plot, all words aside.
fn plots(grammar: &Grammar, rule: usize) -> f64 {
    let rule = &grammar.rules[rule];
    let ways = |symbols: &[Symbol]| {
        symbols.iter().fold(1.0, |product, symbol| match symbol {
            Symbol::Choose { rule, .. } => product * plots(grammar, *rule),
            _ => product,
        })
    };
    if rule.name.starts_with(|c: char| c.is_ascii_uppercase()) {
        rule.alternatives.iter().map(|alternative| ways(&alternative.symbols)).sum()
    } else {
        1.0
    }
}

#[test]
fn there_are_thousands_of_plots() {
    let plots = plots(&GRAMMAR, 0);
    assert!(plots >= 2_000.0, "{plots}");
}

/// Adds how often each alternative comes up in a story on average.
fn count_uses(grammar: &Grammar, rule: usize, times: f64, uses: &mut [Vec<f64>]) {
    for (index, alternative) in grammar.rules[rule].alternatives.iter().enumerate() {
        let times = times * alternative.probability;
        uses[rule][index] += times;
        for symbol in &alternative.symbols {
            if let Symbol::Choose { rule, .. } = symbol {
                count_uses(grammar, *rule, times, uses);
            }
        }
    }
}

#[test]
fn nothing_is_rare() {
    let mut uses: Vec<Vec<f64>> = GRAMMAR.rules.iter().map(|rule| vec![0.0; rule.alternatives.len()]).collect();
    count_uses(&GRAMMAR, 0, 1.0, &mut uses);
    for (rule, uses) in GRAMMAR.rules.iter().zip(&uses) {
        for (alternative, &times) in rule.alternatives.iter().zip(uses) {
            assert!(times >= 1.0 / 300.0, "`{}` of `{}`: once in {:.0}", alternative.forms[0], rule.name, 1.0 / times);
            assert!(alternative.probability >= 0.01, "`{}` of `{}`", alternative.forms[0], rule.name);
        }
    }
}
