//! Computes the strongly connected components of a small graph.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the strongly connected components with at least two nodes, each sorted, ordered by first node.
///
/// The search runs from every node, which is quadratic; a crate has a few dozen modules.
pub(super) fn strongly_connected<'a>(graph: &BTreeMap<&'a str, Vec<&'a str>>) -> Vec<Vec<&'a str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|node| (*node, reached_from(graph, node))).collect();
    let mut placed = BTreeSet::new();
    let mut components = Vec::new();
    for (node, reaches) in &reached {
        if placed.contains(node) {
            continue;
        }
        let reaches_back = |other: &&&str| reached.get(**other).is_some_and(|back| back.contains(node));
        let mut component: Vec<&str> = reaches.iter().filter(reaches_back).copied().collect();
        placed.extend(component.iter().copied());
        if component.len() > 1 {
            component.sort_unstable();
            components.push(component);
        }
    }
    components
}

/// Returns the nodes of a graph that are reachable from `start` by at least one edge.
fn reached_from<'a>(graph: &BTreeMap<&'a str, Vec<&'a str>>, start: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next = vec![start];
    while let Some(node) = next.pop() {
        for to in graph.get(node).into_iter().flatten() {
            if reached.insert(*to) {
                next.push(to);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn components_of(edges: &[(&'static str, &'static str)]) -> Vec<Vec<&'static str>> {
        let mut graph: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (from, to) in edges {
            graph.entry(from).or_default().push(to);
        }
        strongly_connected(&graph)
    }

    #[test]
    fn a_graph_without_a_cycle_has_no_component() {
        assert_eq!(components_of(&[("a", "b"), ("a", "c"), ("b", "c")]), Vec::<Vec<&str>>::new());
    }

    #[test]
    fn cycles_that_share_a_node_are_one_component() {
        assert_eq!(components_of(&[("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]), [["a", "b", "c"]]);
    }

    #[test]
    fn cycles_joined_in_one_direction_are_two_components() {
        let edges = [("c", "d"), ("d", "c"), ("b", "a"), ("a", "b"), ("b", "c"), ("d", "e")];
        assert_eq!(components_of(&edges), [["a", "b"], ["c", "d"]]);
    }
}
