import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { parse } from 'yaml';
import { z } from 'zod';
import { CHART } from './manifests.ts';

/** Rules for Prometheus, as the chart ships them. */
export const ALERTS_FILE = join(CHART, 'files', 'alerts.yaml');
export const DASHBOARD_FILE = join(CHART, 'files', 'dashboard.json');

const alert = z.strictObject({
  alert: z.string(),
  expr: z.string(),
  for: z.string().optional(),
  labels: z.strictObject({ severity: z.enum(['critical', 'warning', 'info']) }),
  annotations: z.strictObject({ summary: z.string(), runbook: z.string() }),
});
const rules = z.strictObject({
  groups: z.array(z.strictObject({ name: z.string(), rules: z.array(alert) })),
});
const dashboard = z.looseObject({
  templating: z.looseObject({ list: z.array(z.looseObject({ name: z.string(), query: z.string() })) }),
  panels: z.array(
    z.looseObject({
      id: z.number(),
      title: z.string(),
      gridPos: z.strictObject({ h: z.number(), w: z.number(), x: z.number(), y: z.number() }),
      targets: z.array(z.looseObject({ expr: z.string() })).optional(),
    }),
  ),
});

export function readAlerts(): readonly z.output<typeof alert>[] {
  const { groups } = rules.parse(parse(readFileSync(ALERTS_FILE, 'utf8')));
  return groups.flatMap((group) => group.rules);
}

export function readDashboard(): z.output<typeof dashboard> {
  return dashboard.parse(JSON.parse(readFileSync(DASHBOARD_FILE, 'utf8')));
}

/** What the dashboard asks Prometheus for, its variables and intervals filled in. */
export function dashboardQueries(): readonly string[] {
  const { panels } = readDashboard();
  return panels
    .flatMap(({ targets = [] }) => targets)
    .map(({ expr }) => expr.replaceAll(/\$(job|model)\b/g, '.*').replaceAll('$__rate_interval', '1m'));
}
