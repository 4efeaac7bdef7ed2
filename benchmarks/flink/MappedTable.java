import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.util.List;
import java.util.Set;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.ProviderContext;
import org.apache.flink.table.connector.source.DataStreamScanProvider;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.connector.source.abilities.SupportsProjectionPushDown;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.factories.FactoryUtil;
import org.apache.flink.table.types.DataType;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.LogicalTypeRoot;
import org.apache.flink.table.types.logical.RowType;

/**
 * A table of Flink SQL over files of plain columns that are mapped into memory, as {@code nexmark_rows.py} writes them.
 * Only the columns that a query wants are read; rows come as Flink's internal ones, without a conversion.
 */
public final class MappedTable implements DynamicTableSourceFactory {
    static final ConfigOption<String> FOLDER = ConfigOptions.key("folder").stringType().noDefaultValue();
    static final ConfigOption<Long> ROWS = ConfigOptions.key("rows").longType().noDefaultValue();

    @Override
    public String factoryIdentifier() {
        return "mapped";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return Set.of(FOLDER, ROWS);
    }

    @Override
    public Set<ConfigOption<?>> optionalOptions() {
        return Set.of();
    }

    @Override
    public DynamicTableSource createDynamicTableSource(Context context) {
        var options = FactoryUtil.createTableFactoryHelper(this, context).getOptions();
        String name = context.getObjectIdentifier().getObjectName();
        return new Source(name, options.get(FOLDER), options.get(ROWS), context.getPhysicalRowDataType());
    }

    static final class Source implements ScanTableSource, SupportsProjectionPushDown {
        private final String name;
        private final String folder;
        private final long rows;
        private DataType type;

        Source(String name, String folder, long rows, DataType type) {
            this.name = name;
            this.folder = folder;
            this.rows = rows;
            this.type = type;
        }

        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.insertOnly();
        }

        @Override
        public boolean supportsNestedProjection() {
            return false;
        }

        @Override
        public void applyProjection(int[][] fields, DataType projected) {
            type = projected;
        }

        @Override
        public DynamicTableSource copy() {
            return new Source(name, folder, rows, type);
        }

        @Override
        public String asSummaryString() {
            return name;
        }

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
            TypeInformation<RowData> information = context.createTypeInformation(type);
            RowType row = (RowType) type.getLogicalType();
            return new DataStreamScanProvider() {
                @Override
                public DataStream<RowData> produceDataStream(
                        ProviderContext provider, StreamExecutionEnvironment environment) {
                    return environment
                            .fromSource(new NumberSequenceSource(0, rows - 1), WatermarkStrategy.noWatermarks(), name)
                            .map(new ReadRow(folder, name, row, rows))
                            .returns(information);
                }

                @Override
                public boolean isBounded() {
                    return false;
                }
            };
        }
    }

    /** One column; texts have their places beside them. */
    private record Column(LogicalTypeRoot type, ByteBuffer data, ByteBuffer ends) {
        Object read(int row) {
            switch (type) {
                case BIGINT:
                    return data.getLong(row * Long.BYTES);
                case TIMESTAMP_WITHOUT_TIME_ZONE:
                    return TimestampData.fromEpochMillis(data.getLong(row * Long.BYTES) / 1000);
                default:
                    int begin = ends.getInt(row * Integer.BYTES);
                    byte[] text = new byte[ends.getInt((row + 1) * Integer.BYTES) - begin];
                    data.get(begin, text);
                    return StringData.fromBytes(text);
            }
        }
    }

    /** Number of the source, which is dealt out in halves, to an even or an odd row: event time is the same in both. */
    static final class ReadRow extends RichMapFunction<Long, RowData> implements Serializable {
        private final String folder;
        private final String table;
        private final List<String> names;
        private final List<LogicalType> types;
        private final long half;
        private transient Column[] columns;
        private transient boolean noted;

        ReadRow(String folder, String table, RowType type, long rows) {
            this.folder = folder;
            this.table = table;
            this.names = List.copyOf(type.getFieldNames());
            this.types = List.copyOf(type.getChildren());
            this.half = (rows + 1) / 2;
        }

        @Override
        public void open(OpenContext context) throws IOException {
            columns = new Column[names.size()];
            for (int i = 0; i < columns.length; i++) {
                LogicalTypeRoot root = types.get(i).getTypeRoot();
                String file = table + "." + names.get(i);
                ByteBuffer ends = root == LogicalTypeRoot.VARCHAR ? map(file + ".ends") : null;
                columns[i] = new Column(root, map(file), ends);
            }
        }

        private ByteBuffer map(String file) {
            try (FileChannel channel = FileChannel.open(Path.of(folder, file))) {
                return channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size()).order(ByteOrder.LITTLE_ENDIAN);
            } catch (IOException e) {
                throw new UncheckedIOException(e);
            }
        }

        @Override
        public RowData map(Long number) {
            if (!noted) {
                noted = true;
                Harness.emitted(System.nanoTime());
            }
            int row = (int) (number < half ? 2 * number : 2 * (number - half) + 1);
            GenericRowData made = new GenericRowData(columns.length);
            for (int i = 0; i < columns.length; i++) {
                made.setField(i, columns[i].read(row));
            }
            return made;
        }
    }
}
