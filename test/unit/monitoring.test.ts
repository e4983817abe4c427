import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import { ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { ERROR_REASONS, isErrorReason } from '../../src/core/errors.ts';
import { SERIES, type SeriesSpec } from '../../src/obs/series.ts';
import { outcomeName } from '../../src/services/plan-message.ts';
import { dashboardQueries, readAlerts, readDashboard } from '../support/monitoring.ts';

interface Selector {
  readonly spec: SeriesSpec;
  readonly matchers: readonly { readonly label: string; readonly values: readonly string[] }[];
}

/** The series that a query asks for, by their names in the text format, with the labels that it matches. */
function selectorsOf(query: string): readonly Selector[] {
  return [...query.matchAll(/\b((?:baton|process|nodejs)_\w+)(?:\{([^}]*)\})?/g)].map(([, name = '', inside = '']) => {
    const spec = SERIES.find((row) =>
      row.kind === 'histogram' ? new RegExp(`^${row.name}_(bucket|sum|count)$`).test(name) : row.name === name,
    );
    if (spec === undefined) throw new Error(`${query} asks for ${name}, and there is no such series`);
    const matchers = [...inside.matchAll(/(\w+)\s*(?:=~|!=|!~|=)\s*"([^"]*)"/g)].map(([, label = '', value = '']) => ({
      label,
      values: value.split('|'),
    }));
    return { spec, matchers };
  });
}

/** Labels that Prometheus adds to what it scrapes, and that buckets have. */
const ADDED = ['job', 'instance', 'le'];

function unknownLabels(query: string): readonly string[] {
  const selectors = selectorsOf(query);
  const known = new Set([...ADDED, ...selectors.flatMap(({ spec }) => spec.labels)]);
  const grouped = [...query.matchAll(/\b(?:by|on)\s*\(([^)]*)\)/g)].flatMap(([, names = '']) =>
    names.split(',').map((name) => name.trim()),
  );
  const matched = selectors.flatMap(({ spec, matchers }) =>
    matchers.flatMap(({ label }) => (ADDED.includes(label) || spec.labels.includes(label) ? [] : [label])),
  );
  return [...grouped.filter((name) => name !== '' && !known.has(name)), ...matched];
}

const alerts = readAlerts();
const queries = [...alerts.map(({ expr }) => expr), ...dashboardQueries()];

describe('alerts and dashboard', () => {
  test('ask for series and labels that baton has', () => {
    expect(alerts.length).toBeGreaterThan(15);
    expect(queries.length).toBeGreaterThan(50);
    for (const query of queries) {
      expect(selectorsOf(query).length, query).toBeGreaterThan(0);
      expect(unknownLabels(query), query).toEqual([]);
    }
  });

  test('match words that baton uses', () => {
    const outcomes: readonly string[] = Object.values(ReuseOutcome).map(outcomeName);
    for (const { spec, matchers } of queries.flatMap(selectorsOf)) {
      for (const { label, values } of matchers) {
        if (spec.name === 'baton_errors_total' && label === 'reason')
          for (const value of values) expect(isErrorReason(value.toUpperCase()), value).toBe(true);
        if (label === 'outcome' && spec.name === 'baton_reuse_total')
          expect(outcomes).toEqual(expect.arrayContaining([...values]));
      }
    }
  });

  test('the check would find a name, a label and a group that are none', () => {
    expect(() => selectorsOf('rate(baton_nothing_total[5m])')).toThrow('no such series');
    expect(() => selectorsOf('baton_ttft_seconds')).toThrow('no such series');
    expect(unknownLabels('sum by (nobody) (baton_breaker_open{colour="red"})')).toEqual(['nobody', 'colour']);
  });

  test('the panels stand beside each other, each once', () => {
    const { panels } = readDashboard();
    expect(new Set(panels.map(({ id }) => id)).size).toBe(panels.length);
    const cells = panels.flatMap(({ gridPos: { x, y, w, h } }) =>
      Array.from({ length: w * h }, (_, index) => `${x + (index % w)} ${y + Math.floor(index / w)}`),
    );
    expect(new Set(cells).size).toBe(cells.length);
  });

  test('the dashboard leaves no family of series out that tells of requests', () => {
    const shown = new Set(dashboardQueries().flatMap((query) => selectorsOf(query).map(({ spec }) => spec.name)));
    const left = SERIES.map(({ name }) => name).filter((name) => name.startsWith('baton_') && !shown.has(name));
    expect(left).toEqual([
      'baton_tenant_requests_total',
      'baton_plan_total',
      'baton_stream_bytes_total',
      'baton_pinned_kv_blocks',
      'baton_pin_events_total',
      'baton_rebound_total',
      'baton_lmcache_notices_total',
      'baton_lmcache_drains_total',
      'baton_config_reloads_total',
      'baton_config_last_reload_success_timestamp_seconds',
      'baton_trace_spans_total',
    ]);
  });
});

describe('docs/troubleshooting.md', () => {
  const text = readFileSync(new URL('../../docs/troubleshooting.md', import.meta.url), 'utf8');
  const rowsOf = (title: string) => {
    const section = text.split(/^## /m).find((part) => part.startsWith(`${title}\n`)) ?? '';
    return [...section.matchAll(/^\| `(\w+)` \|(?: (\d+) \|)? \S/gm)].map(([, word, status]) => ({ word, status }));
  };

  test('has every alert, and each alert names its place there', () => {
    const headings = [...text.matchAll(/^### (\w+)$/gm)].map(([, name]) => name);
    expect(headings).toEqual(alerts.map(({ alert }) => alert));
    for (const { alert, annotations } of alerts)
      expect(annotations.runbook).toBe(`docs/troubleshooting.md#${alert.toLowerCase()}`);
  });

  test('has every error code with its status', () => {
    expect(rowsOf('Errors')).toEqual(
      Object.entries(ERROR_REASONS).map(([name, { httpStatus }]) => ({
        word: name.toLowerCase(),
        status: String(httpStatus),
      })),
    );
  });

  test('has every outcome of reuse', () => {
    const outcomes = Object.values(ReuseOutcome).filter((outcome) => outcome !== ReuseOutcome.UNSPECIFIED);
    expect(rowsOf('Reuse outcomes').map(({ word }) => word)).toEqual(outcomes.map(outcomeName));
  });
});
