import java.util.Map;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;

/**
 * Queries of Nexmark on Flink SQL, in the forms that its own benchmark gives them, over mapped files; see {@link
 * Harness}. Only query 7 joins windows instead of intervals of time, which is less work.
 *
 * <p>Arguments beside those of the harness, whose {@code rows} are events: {@code query} and {@code tables}, the folder
 * of the files. Query 6 is missing: Flink SQL has no window over the last ten rows of an updated table.
 */
public final class Nexmark {
    /** Of 50 events, one is a person, three are auctions, the others bids. */
    private static final int PEOPLE = 1;

    private static final int AUCTIONS = 3;
    private static final int BIDS = 46;

    private static final String COUNTS =
            """
            (SELECT auction, COUNT(*) AS bids, window_start, window_end
             FROM TABLE(HOP(TABLE bid, DESCRIPTOR(`time`), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
             GROUP BY auction, window_start, window_end)""";

    /** A query's result table and its text. */
    record Query(String columns, String sql) {}

    private static final Map<String, Query> QUERIES = Map.of(
            "q0", new Query("auction BIGINT, bidder BIGINT, price BIGINT, `time` TIMESTAMP(3), extra STRING",
                    "SELECT auction, bidder, price, `time`, extra FROM bid"),
            "q1", new Query("auction BIGINT, bidder BIGINT, `time` TIMESTAMP(3), extra STRING, price DOUBLE",
                    "SELECT auction, bidder, `time`, extra, CAST(price AS DOUBLE) * CAST(0.908 AS DOUBLE) FROM bid"),
            "q2", new Query("auction BIGINT, price BIGINT", "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0"),
            "q3", new Query("name STRING, city STRING, state STRING, auction BIGINT",
                    """
                    SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id
                    WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')"""),
            "q4", new Query("category BIGINT, sold BIGINT, price DOUBLE, PRIMARY KEY (category) NOT ENFORCED",
                    """
                    SELECT category, COUNT(*), AVG(CAST(price AS DOUBLE)) FROM
                      (SELECT MAX(b.price) AS price, a.category FROM auction a JOIN bid b ON a.id = b.auction
                       WHERE b.`time` BETWEEN a.`time` AND a.expires GROUP BY a.id, a.category)
                    GROUP BY category"""),
            "q5", new Query("auction BIGINT, bids BIGINT, `start` TIMESTAMP(3)",
                    "SELECT c.auction, c.bids, c.window_start FROM " + COUNTS + " c JOIN (SELECT MAX(bids) AS most, "
                            + "window_start, window_end FROM " + COUNTS + " GROUP BY window_start, window_end) m "
                            + "ON c.window_start = m.window_start AND c.window_end = m.window_end AND c.bids >= m.most"),
            "q7", new Query(
                    "auction BIGINT, price BIGINT, bidder BIGINT, `time` TIMESTAMP(3), window_start TIMESTAMP(3)",
                    """
                    SELECT b.auction, b.price, b.bidder, b.`time`, b.window_start FROM
                      (SELECT * FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(`time`), INTERVAL '10' SECOND))) b JOIN
                      (SELECT MAX(price) AS price, window_start, window_end
                       FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(`time`), INTERVAL '10' SECOND))
                       GROUP BY window_start, window_end) m
                    ON b.window_start = m.window_start AND b.window_end = m.window_end AND b.price = m.price"""),
            "q8", new Query("id BIGINT, name STRING, window_start TIMESTAMP(3)",
                    """
                    SELECT p.id, p.name, p.window_start FROM
                      (SELECT id, name, window_start, window_end
                       FROM TABLE(TUMBLE(TABLE person, DESCRIPTOR(`time`), INTERVAL '10' SECOND))
                       GROUP BY id, name, window_start, window_end) p JOIN
                      (SELECT seller, window_start, window_end
                       FROM TABLE(TUMBLE(TABLE auction, DESCRIPTOR(`time`), INTERVAL '10' SECOND))
                       GROUP BY seller, window_start, window_end) a
                    ON p.id = a.seller AND p.window_start = a.window_start AND p.window_end = a.window_end"""));

    private Nexmark() {}

    private static String table(String name, String columns, String folder, long rows) {
        return String.format(
                "CREATE TABLE %s (%s, `time` TIMESTAMP(3), WATERMARK FOR `time` AS `time` - INTERVAL '2' SECOND) "
                        + "WITH ('connector' = 'mapped', 'folder' = '%s', 'rows' = '%d')",
                name, columns, folder, rows);
    }

    static void build(StreamExecutionEnvironment environment, Map<String, String> options, long events) {
        StreamTableEnvironment tables = StreamTableEnvironment.create(environment);
        String folder = options.get("tables");
        long blocks = events / (PEOPLE + AUCTIONS + BIDS);
        tables.executeSql(
                table("person", "id BIGINT, name STRING, city STRING, state STRING", folder, blocks * PEOPLE));
        tables.executeSql(table("auction", "id BIGINT, item STRING, seller BIGINT, category BIGINT, expires TIMESTAMP(3)",
                folder, blocks * AUCTIONS));
        tables.executeSql(
                table("bid", "auction BIGINT, bidder BIGINT, price BIGINT, extra STRING", folder, blocks * BIDS));
        Query query = QUERIES.get(options.get("query"));
        tables.executeSql("CREATE TABLE outcome (" + query.columns() + ") WITH ('connector' = 'tally')");
        tables.createStatementSet().addInsertSql("INSERT INTO outcome " + query.sql()).attachAsDataStream();
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = Harness.options(arguments);
        Harness.main(
                options,
                (environment, rows) -> build(environment, options, rows),
                () -> ", \"sums\": " + TallyTable.sums());
    }
}
