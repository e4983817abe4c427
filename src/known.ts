import type { Known } from './config/build-input.ts';
import { CONNECTORS } from './connectors/index.ts';
import { POLICIES } from './policies/index.ts';
import { STORES } from './stores/index.ts';

/** The names that settings may choose from. */
export const KNOWN: Known = {
  policies: Object.keys(POLICIES),
  connectors: Object.keys(CONNECTORS),
  stores: Object.keys(STORES),
};
