/* WordPiece over printable ASCII, as BERT's normaliser and pre-tokenizer prepare it: greedy longest match in a trie.

   A word between white space that holds any other byte is *odd*: its tokens are computed elsewhere and passed in.
   Nothing here keeps state: every call may run at the same time as any other. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Classes of bytes: below LETTERS, a letter or digit; letters that differ in case share one if case is ignored. */
enum { LETTERS = 64, SPACE = LETTERS, PUNCTUATION, OTHER };
enum { NONE = -1 };
#define UNUSED UINT32_MAX

/* One edge of the trie, kept in a hash table with open addressing: node 0 begins a word, node 1 continues it. */
typedef struct {
    uint32_t key;   /* node * LETTERS + class, or UNUSED */
    uint32_t child;
    int32_t id;     /* of the piece that ends here, or NONE */
} edge;

typedef struct {
    const uint8_t *classes;      /* of each byte */
    const int32_t *punctuation;  /* the token of each byte that is a word of its own */
    const edge *edges;
    int64_t bits;                /* the table has 2^bits edges, at least one of them UNUSED */
    int64_t longest;             /* a longer word is unknown */
    int64_t unknown;             /* its token */
    const uint8_t *added;        /* contents of the added tokens in lower case, one after the other */
    const int64_t *added_at;     /* where each begins, then the end */
    int64_t added_count;
    const uint8_t *begins_added; /* of each byte: whether an added token begins with it, in either case */
    const int32_t *before, *after;
    int64_t before_count, after_count;
} vocabulary;

static uint32_t slot(uint32_t key, int64_t bits) { return (key * UINT32_C(2654435769)) >> (32 - bits); }

static const edge *follow(const vocabulary *v, uint32_t node, uint8_t class) {
    const uint32_t key = node * LETTERS + class, mask = (UINT32_C(1) << v->bits) - 1;
    for (uint32_t at = slot(key, v->bits);; at = (at + 1) & mask) {
        if (v->edges[at].key == key)
            return v->edges + at;
        if (v->edges[at].key == UNUSED)
            return NULL;
    }
}

/* Fill a table of 2^bits edges with pieces of letters and digits; roots[i] is the node that piece i begins at.

   Returns the number of edges, or -1 if more than half of the table would be used. */
int64_t fill(edge *edges, int64_t bits, const uint8_t *classes, const uint8_t *pieces, const int64_t *offsets,
             const int32_t *ids, const uint8_t *roots, int64_t count) {
    if (bits < 1 || bits > 26)
        return -1;
    const uint32_t mask = (UINT32_C(1) << bits) - 1;
    const int64_t most = INT64_C(1) << (bits - 1);
    for (int64_t i = 0; i <= (int64_t)mask; i++)
        edges[i] = (edge){UNUSED, 0, NONE};
    int64_t used = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t node = roots[i];
        for (int64_t j = offsets[i]; j < offsets[i + 1]; j++) {
            const uint32_t key = node * LETTERS + classes[pieces[j]];
            uint32_t at = slot(key, bits);
            while (edges[at].key != UNUSED && edges[at].key != key)
                at = (at + 1) & mask;
            if (edges[at].key == UNUSED) {
                if (used == most)
                    return -1;
                edges[at] = (edge){key, (uint32_t)(used + 2), NONE};
                used++;
            }
            node = edges[at].child;
            if (j + 1 == offsets[i + 1])
                edges[at].id = ids[i];
        }
    }
    return used;
}

static int is_space(uint8_t c) { return (c == ' ') | (c == '\t') | (c == '\n') | (c == '\r'); }

static int is_odd(uint8_t c) { return ((uint8_t)(c - 33) > '~' - 33) & !is_space(c); }

/* Find the odd words: spans gets the begin and end of each, first[i] how many are in the texts before text i.

   A text with an odd word of more than `longest` bytes is left out: its lost[i] is -1, that of all others 0. spans has
   room for a word for every two bytes and one more for each text. Returns the number of odd words. */
int64_t odd_words(const uint8_t *text, const int64_t *offsets, int64_t count, int64_t longest, int64_t *first,
                  int64_t *spans, int64_t *lost) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        first[i] = found;
        lost[i] = 0;
        const int64_t begin = offsets[i], end = offsets[i + 1];
        int any = 0;
        for (int64_t j = begin; j < end; j++)
            any |= is_odd(text[j]);
        for (int64_t j = begin; any && j < end;) {
            const int64_t word = j;
            int odd = 0;
            for (; j < end && !is_space(text[j]); j++)
                odd |= is_odd(text[j]);
            if (odd && j - word > longest) {
                lost[i] = -1;
                found = first[i];
                break;
            }
            if (odd) {
                spans[2 * found] = word;
                spans[2 * found + 1] = j;
                found++;
            }
            while (j < end && is_space(text[j]))
                j++;
        }
    }
    first[count] = found;
    return found;
}

static uint8_t lower(uint8_t c) { return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c; }

/* Whether the bytes from here on may be an added token: whatever their case, because some are matched in lower case. */
static int begins_added(const vocabulary *v, const uint8_t *at, const uint8_t *end) {
    if (!v->begins_added[*at])
        return 0;
    for (int64_t i = 0; i < v->added_count; i++) {
        const uint8_t *content = v->added + v->added_at[i];
        const ptrdiff_t size = v->added_at[i + 1] - v->added_at[i];
        ptrdiff_t same = 0;
        if (end - at < size)
            continue;
        while (same < size && lower(at[same]) == content[same])
            same++;
        if (same == size)
            return 1;
    }
    return 0;
}

/* The tokens of a word of letters and digits: at most one for each byte. */
static int32_t *word(const vocabulary *v, const uint8_t *at, const uint8_t *end, int32_t *out) {
    int32_t *const begin = out;
    for (uint32_t root = 0; at < end; root = 1) {
        const uint8_t *after = NULL;
        int32_t id = NONE;
        uint32_t node = root;
        for (const uint8_t *next = at; next < end;) {
            const edge *found = follow(v, node, v->classes[*next]);
            if (found == NULL)
                break;
            node = found->child;
            next++;
            if (found->id != NONE) {
                id = found->id;
                after = next;
            }
        }
        if (after == NULL) {
            *begin = (int32_t)v->unknown;
            return begin + 1;
        }
        *out++ = id;
        at = after;
    }
    return out;
}

/* The tokens of printable ASCII: at most one for each byte. NULL if it may hold an added token, or another byte. */
static int32_t *plain(const vocabulary *v, const uint8_t *at, const uint8_t *end, int32_t *out) {
    while (at < end) {
        const uint8_t class = v->classes[*at];
        if (class < LETTERS) {
            const uint8_t *const begin = at;
            do
                at++;
            while (at < end && v->classes[*at] < LETTERS);
            if (at - begin > v->longest)
                *out++ = (int32_t)v->unknown;
            else
                out = word(v, begin, at, out);
        } else if (class == SPACE) {
            at++;
        } else if (class == PUNCTUATION && !begins_added(v, at, end)) {
            *out++ = v->punctuation[*at++];
        } else {
            return NULL;
        }
    }
    return out;
}

static int holds_added(const vocabulary *v, const uint8_t *at, const uint8_t *end) {
    for (; at < end; at++)
        if (begins_added(v, at, end))
            return 1;
    return 0;
}

/* The tokens of one text with these odd words. NULL if it may hold an added token. */
static int32_t *content(const vocabulary *v, const uint8_t *text, int64_t at, int64_t end, const int64_t *spans,
                        int64_t odd, int64_t last_odd, const int32_t *odd_ids, const int64_t *odd_at, int32_t *out) {
    for (; odd < last_odd; odd++) {
        const int64_t begin = spans[2 * odd], size = odd_at[odd + 1] - odd_at[odd];
        out = plain(v, text + at, text + begin, out);
        at = spans[2 * odd + 1];
        if (out == NULL || holds_added(v, text + begin, text + at))
            return NULL;
        if (size)
            memcpy(out, odd_ids + odd_at[odd], (size_t)size * sizeof *out);
        out += size;
    }
    return plain(v, text + at, text + end, out);
}

static int32_t *append(int32_t *out, const int32_t *ids, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        out[i] = ids[i];
    return out + count;
}

/* Tokenise texts, keep at most `most` tokens of each text's begin or end, and put the special tokens around them.

   The tokens of odd word i are odd_ids[odd_at[i]] to odd_ids[odd_at[i + 1]]. out has room for one token for each byte,
   all of odd_ids and the special tokens of every text. rows gets where each text's tokens begin, then the end; lost the
   number of tokens cut off, or -1 for a text that may hold an added token. The row of a text whose lost is -1, also
   that of one that was left out before, is empty. */
void tokenise(const vocabulary *v, const uint8_t *text, const int64_t *offsets, int64_t count, const int64_t *first,
              const int64_t *spans, const int32_t *odd_ids, const int64_t *odd_at, int64_t most, int64_t keep_end,
              int32_t *out, int64_t *rows, int64_t *lost) {
    int32_t *const values = out;
    for (int64_t i = 0; i < count; i++) {
        rows[i] = out - values;
        if (lost[i] < 0)
            continue;
        int32_t *const begin = append(out, v->before, v->before_count);
        int32_t *end = content(v, text, offsets[i], offsets[i + 1], spans, first[i], first[i + 1], odd_ids, odd_at, begin);
        lost[i] = end == NULL ? -1 : end - begin > most ? end - begin - most : 0;
        if (end == NULL)
            continue;
        if (lost[i] && keep_end)
            memmove(begin, begin + lost[i], (size_t)most * sizeof *begin);
        out = append(end - lost[i], v->after, v->after_count);
    }
    rows[count] = out - values;
}
