import * as z from 'zod';
import { field, section } from './fields.ts';
import { countParser, MAX_COUNT, numberParser, parseDuration, parseSize, parseText } from './values.ts';

/** The policy of each leg. */
export const policyPair = z.strictObject({
  prefill: field(parseText, 'round_robin', 'How a prefill instance is chosen.'),
  decode: field(parseText, 'round_robin', 'How a decode instance is chosen.'),
});

/** What single policies go by. */
export const policiesSection = section({
  consistent_hash: section({
    load_factor: field(
      numberParser(1, 1.25),
      1.25,
      'Most legs of an engine as a multiple of the mean; a conversation whose engine has as many goes to its next one.',
    ),
  }),
  cache_aware: section({
    cache_threshold: field(
      numberParser(0, 1),
      0.3,
      'Share of a prompt that must be known to an engine for it to be preferred.',
    ),
    balance_abs_threshold: field(
      countParser(0, MAX_COUNT),
      64,
      'An engine with more legs than the idlest by this number and by the factor below is not preferred.',
    ),
    balance_rel_threshold: field(numberParser(1, 1000), 1.5, 'That factor.'),
    max_bytes: field(parseSize, '64MiB', 'Bytes of the index, for each of the two roles.'),
    max_age: field(parseDuration, '10m', 'How long a beginning is believed to be cached after its last use.'),
  }),
  sticky_least_loaded: section({
    max_legs: field(
      countParser(1, MAX_COUNT),
      8,
      'An engine keeps its conversations unless it has this many legs, and twice as many as the idlest.',
    ),
    sessions: field(countParser(1, 10_000_000), 100_000, 'Conversations that are remembered.'),
  }),
});
